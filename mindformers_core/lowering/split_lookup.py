"""Lookups in a table that ranks store in parts of unequal sizes, each part a table of its own: `manual_split`.

After the attribute of this name of MindSpore's `Gather` and `EmbeddingLookup`, for data of which each column has a
table of its own: nothing is communicated.
"""

from mindspore import Tensor, ops

OPERATORS = ("Gather", "EmbeddingLookup")


def manual_split(table, ids):
    """Rows of a table, (rows, width), by number: ids (…, columns) of an int dtype → (…, columns, width).

    Where the table is stored as `layout(axis, pad=(10, 20, 30, 4))`, the columns are divided evenly among the parts, in
    order, and a rank looks up those of its part; the result is cut along the columns. An id that isn't a row of its
    column's part finds zeros. Otherwise, as on one card, this is `ops.gather(table, ids, 0)`.

    Args:
        table: a Parameter of the Cell.
        ids: numbers of rows of the whole table.

    Raises:
        ValueError: columns that the number of parts doesn't divide.
    """
    sizes = getattr(table, "part_sizes", (None,))[0]
    if sizes is None:
        return ops.gather(table, ids, 0)
    parts, room, columns, width = len(sizes), max(sizes), ids.shape[-1], table.shape[1]
    if columns % parts:
        raise ValueError(
            f"manual_split: ids of shape {tuple(ids.shape)} have {columns} columns, which can't be divided evenly "
            f"among the {parts} parts {sizes} of a table of {sum(sizes)} rows: give as many columns for each part"
        )
    starts = [[sum(sizes[:number])] for number in range(parts)]
    local = ops.sub(ops.reshape(ids, (-1, parts, columns // parts)), Tensor(starts, ids.dtype))
    absent = ops.logical_or(ops.less(local, 0), ops.greater_equal(local, Tensor([[each] for each in sizes], ids.dtype)))
    rows = ops.transpose(ops.masked_fill(local, absent, 0), (1, 0, 2))
    tables = ops.reshape(table.stored, (parts, room, width))
    found = ops.gather(tables, ops.reshape(rows, (parts, -1)), 1, 1)
    found = ops.transpose(ops.reshape(found, (*rows.shape, width)), (1, 0, 2, 3))
    found = ops.masked_fill(found, ops.expand_dims(absent, -1), 0.0)
    return ops.reshape(found, (*ids.shape, width))


def split_by_attribute(name, args, primitive):
    """The results of a lookup by a primitive with the attribute `manual_split`; None where it is an ordinary one.

    Raises:
        ValueError: the table is cut, and not in these parts; or the lookup isn't along dim 0.
    """
    asked = getattr(primitive, "attrs", {}).get("manual_split") if name in OPERATORS else None
    if asked is None or not getattr(getattr(args[0], "layout", None), "cut_axes", ()):
        return None
    sizes, along = getattr(args[0], "part_sizes", (None,))[0], args[2] if len(args) > 2 else 0
    if sizes != tuple(asked) or along != 0:
        raise ValueError(
            f"{name} has the attribute manual_split={tuple(asked)}, but its table of shape {tuple(args[0].shape)} is "
            f"stored as {args[0].layout}, looked up along dim {along}: declare the layout of the table, as "
            f"layout(axis, pad={tuple(asked)})"
        )
    return manual_split(*args[:2])
