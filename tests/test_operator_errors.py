"""What the rules of operators say of calls that don't fit, and how a user adds a rule."""

from support.documents import code_blocks
from support.launch import ROOT

from mindformers_core.operators import registry, signature_of, tensor_meta

F32 = "float32"


def test_the_rule_of_the_page(monkeypatch):
    """docs/tensor_parallel.md: distances between rows; only their number may be cut."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    (block,) = [text for text in code_blocks(ROOT / "docs" / "tensor_parallel.md", "python") if "MyDistances" in text]
    exec(compile(block, "tensor_parallel.md", "exec"), {})
    found = signature_of("MyDistances", [tensor_meta((4, 8), F32), tensor_meta((6, 8), F32), 2.0])
    assert found.outputs == ((("n",), ("m",)),) and found.sizes == {"n": 4, "m": 6, "K": 8} and found.whole == {"K"}


def test_nested_lists_of_attributes_are_tuples():
    assert registry.rule_attributes("Pad", {"paddings": [[0, 1], [0, 0]]}) == {"paddings": ((0, 1), (0, 0))}
