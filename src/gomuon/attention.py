"""Finding the query and key layers of attention modules."""

from collections.abc import Iterator

from torch import Tensor, nn

from gomuon.layers import LayerSpec

_NAMES = (("q", "k"), ("q_proj", "k_proj"), ("query", "key"), ("wq", "wk"))
_HEAD_COUNTS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")


def query_key_specs(model: nn.Module, heads: int | None) -> dict[Tensor, LayerSpec]:
    """Query and key weights split into heads, each with the other as its partner.

    Args:
        model: searched for modules that hold a query and a key `nn.Linear` under a usual name.
        heads: per attention module; None reads it off the module.

    Raises:
        ValueError: there is no such pair, or the number of heads is unknown or does not divide.
    """
    specs: dict[Tensor, LayerSpec] = {}
    for name, module, query, key in _pairs(model):
        count = heads or next(
            (getattr(module, n) for n in _HEAD_COUNTS if hasattr(module, n)), None
        )
        if not isinstance(count, int):
            raise ValueError(f"cannot tell the number of heads of {name!r}; pass heads=")
        if query.weight.shape != key.weight.shape or query.weight.shape[0] % count:
            raise ValueError(
                f"{name!r}: query {tuple(query.weight.shape)} and key {tuple(key.weight.shape)} "
                f"must have one shape whose rows {count} heads divide"
            )
        specs[query.weight] = LayerSpec(heads=count, partner=key.weight)
        specs[key.weight] = LayerSpec(heads=count, partner=query.weight)
    if not specs:
        names = ", ".join(f"{q}/{k}" for q, k in _NAMES)
        raise ValueError(
            f"{type(model).__name__} has no module with query and key linear layers named {names}"
        )
    return specs


def _pairs(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Linear, nn.Linear]]:
    for name, module in model.named_modules():
        for q, k in _NAMES:
            query, key = getattr(module, q, None), getattr(module, k, None)
            if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
                yield name, module, query, key
