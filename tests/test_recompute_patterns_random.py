"""Patterns that select Cells and operators of random programs, against regular expressions over whole names."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from seeds import seeds

from mindformers_core.recompute.operator_names import Label, OperatorName
from mindformers_core.recompute.patterns import select
from mindformers_core.recompute.places import Place

CELL_NAMES = ("a", "b", "ab", "a_proj", "b_proj", "0", "1", "2", "5", "12")
OPERATORS = ("MatMulExt", "MatMul", "Mul", "CastExtView", "SumExt", "all_gather")
VARIABLES = (None, None, "q", "mul", "Mul", "a_proj", "b")


def reference(pattern):
    """A regular expression for `/a/b` of a Cell, and `/a/b/>matmul#0` or `/a/b/>=weights#0` of an operator in it."""
    rooted, anything = pattern.startswith("."), "(/[^/]+)*"
    texts = pattern[rooted:].split(".")
    expression = "" if rooted else anything
    for place, text in enumerate(texts):
        if text == "**" or (text == "*" and place == 0 < len(texts) - 1 and not rooted):
            expression += anything
        elif re.fullmatch("[0-9,-]+", text):
            expression += f"/({numbers(text)})"
        else:
            name, _, index = text.partition("[")
            cell, operator = (
                re.escape(each).replace(r"\*", "[^/>#=]*").replace(r"\?", "[^/>#=]")
                for each in (name, name.replace("_", "").lower())
            )
            counted = numbers(index[:-1]) if index else "[0-9]+"
            expression += f"(/>({operator}|={cell})#({counted})" + ("" if index else f"|/{cell}") + ")"
    return re.compile(expression)


def numbers(text):
    """`1,3-5` as `1|3|4|5`."""
    ranges = [list(map(int, entry.split("-"))) for entry in text.split(",")]
    return "|".join(str(number) for entry in ranges for number in range(entry[0], entry[-1] + 1))


def random_program(generator):
    """`(names, cells)`, with Cells that are called more than once."""
    cells = [((), "")]
    for number in range(generator.randint(1, 10)):
        key, path = generator.choice(cells)
        cells.append(((*key, number), f"{path}.{generator.choice(CELL_NAMES)}".strip(".")))
    names = []
    for key, path in cells:
        made = [(generator.choice(OPERATORS), generator.choice(VARIABLES)) for _ in range(generator.randint(0, 4))]
        labels = [labels_of(*each) for each in made]
        seen = Counter()
        totals = Counter(label for each in labels for label in each)
        for number, ((operator, _), each) in enumerate(zip(made, labels)):
            known = tuple(Label(*label, seen[label], totals[label]) for label in each)
            names.append(OperatorName(Place((*key, 100 + number), path, None, None), path, operator, known))
            seen.update(each)
    return names, cells


def labels_of(operator, variable):
    friendly = {"MatMulExt": "MatMul", "CastExtView": "Cast", "SumExt": "Sum"}.get(operator, operator)
    found = [(name, False) for name in dict.fromkeys((friendly, operator))]
    return found + ([(variable, True)] if variable else [])


def random_pattern(generator, names, cells):
    """Made of the name of something that is there, changed here and there."""
    texts = [text for text in generator.choice(cells)[1].split(".") if text]
    if names and generator.random() < 0.6:
        name = generator.choice(names)
        texts = [text for text in name.path.split(".") if text]
        label = generator.choice(name.labels)
        spelled = label.name if label.variable else generator.choice((str, str.lower, str.upper))(label.name)
        texts.append(changed(generator, spelled) + generator.choice(("", "", "[0]", "[1]", "[0-1]", "[0,2-3]")))
    last = texts[-1:] if texts and "[" in texts[-1] else []
    texts = [changed(generator, text) for text in texts[: len(texts) - len(last)]] + last
    texts = texts[generator.choice((0, 0, 1, 2)) :] or ["*"]
    for extra in ("**", "*"):
        if generator.random() < 0.15:
            texts.insert(generator.randint(0, len(texts) - ("[" in texts[-1])), extra)
    return generator.choice(("", "", "", ".")) + ".".join(texts)


def changed(generator, text):
    """A segment that may still mean the same."""
    if generator.random() < 0.5 or "*" in text:
        return text
    if text.isdigit():
        return generator.choice(("0-5", "1,5", "0-1,12", "*", "?", "**", "3-11"))
    place = generator.randrange(len(text))
    wild = generator.choice((text[:place] + "*", "*" + text[place:], text[:place] + "?" + text[place + 1 :], "*"))
    return generator.choice((wild, wild, "a", "q"))


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_random_patterns_against_the_reference(seed):
    generator = random.Random(seed)
    outcomes = Counter()
    for _ in range(400):
        names, cells = random_program(generator)
        pattern = random_pattern(generator, names, cells)
        expression = reference(pattern)
        spelled = [(key, f"/{path.replace('.', '/')}" if path else "") for key, path in cells]
        expected_cells = tuple(key for key, text in spelled if expression.fullmatch(text))
        expected = () if expected_cells else tuple(operators_of(expression, names))
        outcomes["Cells" if expected_cells else "operators" if expected else "nothing"] += 1
        found = select([pattern], names, cells, required=False)
        assert (found.cells, found.operators) == (expected_cells, expected), (pattern, cells)
        if not expected_cells and not expected:
            with pytest.raises(ValueError, match=re.escape(f"select: {pattern!r} matches no ")):
                select([pattern], names, cells)
        elif is_partly_there(pattern, spelled, names, expected_cells, expected):
            outcomes["partly there"] += 1
            better = corrected(pattern, names, cells)
            assert select([better], names, cells) == replace(found, by_pattern={better: found.by_pattern[pattern]})
        else:
            assert select([pattern], names, cells) == found
    assert min(outcomes[each] for each in ("Cells", "operators", "nothing")) > 50, outcomes
    assert outcomes["partly there"] > 20, outcomes


def corrected(pattern, names, cells):
    """What the errors of a pattern that is only partly there lead to."""
    while True:
        with pytest.raises(ValueError, match=re.escape(f"select: {pattern!r} is only partly there: ")) as error:
            select([pattern], names, cells)
        pattern = str(error.value).rpartition(": write ")[2].strip("'")
        try:
            select([pattern], names, cells)
        except ValueError:
            continue
        return pattern


def is_partly_there(pattern, spelled, names, cells, operators):
    """Whether a number in a pattern that matches something is in no list of Cells on the way, or no index."""
    chosen = [text for key, text in spelled if key in cells or any(key == other[:-1] for other in operators)]
    beginnings = {text[: found.start()] for _, text in spelled for found in re.finditer("/|$", text)}
    texts = pattern.split(".")
    for place, text in enumerate(texts):
        if re.fullmatch("[0-9,-]+", text):
            head = reference(".".join(texts[: place + 1]))
            lists = {
                each.rpartition("/")[0]
                for each in beginnings
                if head.fullmatch(each) and any(f"{other}/".startswith(f"{each}/") for other in chosen)
            }
            there = {each.rpartition("/")[2] for each in beginnings if each.rpartition("/")[0] in lists}
            if not set(numbers(text).split("|")) <= there:
                return True
    name, _, index = texts[-1].partition("[")
    bare = reference(".".join([*texts[:-1], name]))
    counts = [number for number in range(9) if any(operators_of(bare, names, number))]
    return bool(index) and not {int(number) for number in numbers(index[:-1]).split("|")} <= set(counts)


def operators_of(expression, names, number=None):
    """Keys of the operators that fit by one of their labels, by one with this number if given."""
    for name in names:
        path = f"/{name.path.replace('.', '/')}" if name.path else ""
        plain = [f"={label.name}" if label.variable else label.name.replace("_", "").lower() for label in name.labels]
        ends = [
            f"{path}/>{text}#{label.number}"
            for text, label in zip(plain, name.labels)
            if number in (None, label.number)
        ]
        if any(map(expression.fullmatch, ends)):
            yield name.place.key
