"""Output heads: the layers that compute a model's outputs, found by documented rules.

`example_input` replaces the rules by what a forward pass shows (`parameters/traced_heads.py`).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from gomuon.parameters.rows import Convolution, is_transposed_linear, rows_for
from gomuon.parameters.sampling import Sampling

Heads = Mapping[nn.Module, str]  # a head, and why it is one

# Usual names of layers that compute outputs.
_OUTPUTS = {
    *("lm_head", "head", "heads", "head_dist", "classifier", "classifier_distill", "output_head"),
    *("score", "qa_outputs", "embed_out", "unembed", "actor", "critic", "policy"),
}
# Those of a variational autoencoder's latent variables, which are outputs beside the decoder's.
_LATENTS = {
    *("mu", "logvar", "log_var", "fc_mu", "fc_mean", "fc_logvar", "fc_log_var", "fc_var"),
    *("to_mu", "to_logvar", "log_std"),
}
# Usual names only beside one of the others: attention has a "value" as well.
_BESIDE = {
    "value": {"policy", "actor"},
    "visual_projection": {"text_projection"},  # of CLIP; alone it feeds a language model
    "text_projection": {"visual_projection"},
}
# Parts of the names of layers that embed a time or noise level.
_TIME = re.compile(r"(^|_)(time|times|timestep|timesteps|temb|t_emb|t_embed|t_embedder|sigma)(_|$)")
_ATTENTION = re.compile(r"attn|attention")
# So are all that end in one of these, but for heads of attention, DistilBERT's `pre_classifier`,
# and `conv_head` of timm's EfficientNets.
_ENDS = ("_head", "_classifier", "_predictor")
_NO_HEAD = re.compile(r"attn|attention|multi_?head|^pre_classifier$|^conv_head$")
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def heads_by_rule(model: nn.Module) -> Heads:
    """The heads of a model, with the rule that each follows.

    1. What `get_output_embeddings()` returns.
    2. Linear layers and 1×1 convolutions with a usual name (`lm_head`, `classifier`, `policy`,
       names that end in `_head`, …), and in modules with such a name the last one: of each entry,
       if it is a list. Inside a numbered block (`blocks.2.score`) only if there are none outside.
       Not inside of attention, and not the layers of such a module that come before a head.
    3. If there are none: the linear layer or 1×1 convolution that is registered last of all linear
       layers and convolutions. Not inside a numbered block, and no embedding of a time.
    4. Beside these, layers with the usual names of a variational autoencoder (`fc_mu`, `logvar`).
    """
    named = {name: module for name, module in model.named_modules() if name}
    layers = {name: module for name, module in named.items() if may_be_head(module)}
    found: dict[nn.Module, str] = {}
    getter = getattr(model, "get_output_embeddings", None)
    declared = getter() if callable(getter) else None
    if isinstance(declared, nn.Linear):
        found[declared] = "declared by get_output_embeddings"
    found |= {m: why for m, why in _with_names(named, layers, _is_output(named)) if m not in found}
    before = _before_heads(named, layers, found)
    found = {module: why for module, why in found.items() if module not in before}
    latents = dict(_with_names(named, layers, lambda name: _last_part(name) in _LATENTS))
    if not found and (last := _registered_last(named, latents)) is not None:
        kind = "linear layer" if isinstance(last, nn.Linear) else "layer, a 1×1 convolution,"
        found[last] = f"last {kind} registered"
    return {**{module: why for module, why in latents.items() if module not in found}, **found}


def may_be_head(module: nn.Module) -> bool:
    """Whether the rules may take a module for a head: a linear layer or a 1×1 convolution."""
    if isinstance(module, Convolution):
        return rows_for(module, Sampling()) is not None and set(module.kernel_size) == {1}
    return isinstance(module, nn.Linear)


def is_numbered(name: str) -> bool:
    """Whether a layer is inside a numbered block, such as `blocks.2.mlp.down`."""
    return any(part.isdigit() for part in name.split(".")[:-1])


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _is_output(named: Mapping[str, nn.Module]) -> Callable[[str], bool]:
    def check(name: str) -> bool:
        parent, _, own = name.rpartition(".")
        if any(_ATTENTION.search(part) for part in parent.split(".")):
            return False
        if own in _BESIDE:
            prefix = f"{parent}." if parent else ""
            return any(f"{prefix}{other}" in named for other in _BESIDE[own])
        return own in _OUTPUTS or (own.endswith(_ENDS) and not _NO_HEAD.search(own))

    return check


def _with_names(
    named: Mapping[str, nn.Module],
    layers: Mapping[str, nn.Module],
    is_usual: Callable[[str], bool],
) -> Iterator[tuple[nn.Module, str]]:
    """Layers with a usual name, or the last ones in modules with a usual name."""
    own = [name for name in layers if is_usual(name)]
    outside = [name for name in own if not is_numbered(name)]
    for name in outside:
        yield layers[name], f"named {_last_part(name)}"
    inside = [name for name in named if name not in layers and is_usual(name)]
    any_inside = False
    for name in inside:
        # One that is in another of them is a part of its entry.
        if is_numbered(name) or any(name.startswith(f"{other}.") for other in inside):
            continue
        for entry in _entries(name, named[name], is_usual):
            last = [n for n in layers if n == entry or n.startswith(f"{entry}.")][-1:]
            any_inside |= bool(last)
            yield from ((layers[n], f"last of {name}") for n in last)
    if own and not outside and not any_inside:
        yield layers[own[-1]], f"named {_last_part(own[-1])}"


def _entries(name: str, module: nn.Module, is_usual: Callable[[str], bool]) -> Sequence[str]:
    """Where heads may be in a module with a usual name.

    In each entry of a list; in each of its own modules with a usual name; otherwise once. Entries
    that are modules of their own may be the heads of an attention.
    """
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        inner = [f"{name}.{key}" for key, _ in module.named_children()]
        return [one for one in inner if is_usual(one)] or [name]
    kinds = (nn.Linear, Convolution, nn.Sequential)
    return [f"{name}.{key}" for key, one in module.named_children() if isinstance(one, kinds)]


def _before_heads(
    named: Mapping[str, nn.Module], layers: Mapping[str, nn.Module], found: Heads
) -> set[nn.Module]:
    """Layers of modules that are named as heads, but come before them.

    Such as ModernBERT's `head` with one square layer, or SigLIP's, which pools by attention.
    """
    before: set[nn.Module] = set()
    for name, module in named.items():
        inside = [layer for key, layer in layers.items() if key.startswith(f"{name}.")]
        if name not in layers and inside and found.get(inside[-1]) == f"last of {name}":
            pools = any(_ATTENTION.search(part) for part, _ in module.named_modules())
            if (len(inside) == 1 and _is_square(inside[0])) or (pools and name.endswith("head")):
                before.add(inside[-1])
    return before


def _is_square(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features == module.out_features


def _registered_last(
    named: Mapping[str, nn.Module], others: Mapping[nn.Module, str]
) -> nn.Module | None:
    """The last layer of the model, if it may be a head."""
    kinds = (nn.Linear, Convolution, _TRANSPOSED)
    ordered = [
        (name, module)
        for name, module in named.items()
        if (isinstance(module, kinds) or is_transposed_linear(module))
        and module not in others
        and not any(_TIME.search(part) for part in name.split("."))
    ]
    if sum(rows_for(module, Sampling()) is not None for module in named.values()) < 2:
        return None  # the only matrix must be the one to optimize
    if not ordered:
        return None
    name, module = ordered[-1]
    return module if may_be_head(module) and not is_numbered(name) else None
