import pytest

from mooncake.messages.migration import LayerRange, ModuleKind, ModulesPart


@pytest.mark.parametrize(
    ("part", "kind", "what"),
    [
        (ModulesPart(2), ModuleKind.HEADS, "2 of the KV heads"),
        (ModulesPart(layers=LayerRange(3, 7)), ModuleKind.LAYERS, "layers 3:7"),
        (ModulesPart(share=0.5), ModuleKind.PAGES, "the first 50% of sequences"),
    ],
)
def test_a_part_has_one_kind_of_modules(part: ModulesPart, kind: ModuleKind, what: str) -> None:
    assert (part.kind, part.what) == (kind, what)


def test_a_part_of_two_kinds_is_refused() -> None:
    with pytest.raises(ValueError, match="got several of them"):
        ModulesPart(1, share=0.5)
