"""The command `gomuon plan`."""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, get_args

import tyro

from gomuon.functional.polar_factor import PolarMethod
from gomuon.lab.costs import planned_model, scaling_page
from gomuon.lab.costs.comparison import ACCELERATOR_POLAR, OPTIMIZERS, compare_costs, given_settings
from gomuon.lab.costs.cost_tables import print_comparison
from gomuon.lab.costs.estimate import RankLayout
from gomuon.lab.costs.fit_tables import print_fitting, refusal
from gomuon.lab.costs.fitting import RESERVED, Bounds, Fitting, fit_methods
from gomuon.lab.costs.published_models import CONFIGURATIONS
from gomuon.lab.costs.sizes import parse_bytes
from gomuon.lab.costs.tensor_plan import TensorPlan
from gomuon.lab.costs.traffic import Mesh
from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.flags import (
    NO_DEFAULT_SHOWN,
    Flag,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalText,
)
from gomuon.lab.input_checks import require_positive, require_whole
from gomuon.lab.terminal import SafeConsole
from gomuon.parameters.keeping import StateDtype
from gomuon.parameters.routing import Treatment

STATE_DTYPES = list(get_args(StateDtype))
OFFLOADS = ["factors", "maps"]
TURNS = {"": None, "on": True, "off": False}
SUMS_DTYPES = ["bfloat16"]
TENSOR_MODES = ["blocks", "exact"]


def plan(
    name: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]"), NO_DEFAULT_SHOWN
    ] = "",
    /,
    model: OptionalText = "",
    input: OptionalText = "",
    ranks: int = 1,
    shards: int = 1,
    tensor_parallel: OptionalInt = None,
    tensor_parallel_mode: OptionalText = "",
    colwise: OptionalText = "",
    rowwise: OptionalText = "",
    shared_inputs: Flag = False,
    replicate: Flag = False,
    routes: OptionalText = "",
    optimizers: str = OPTIMIZERS,
    refresh_every: OptionalInt = None,
    rows: OptionalInt = None,
    token_stride: OptionalInt = None,
    tokens: OptionalInt = None,
    dtype: str = "float32",
    polar: str = ACCELERATOR_POLAR,
    state_dtype: OptionalText = "",
    offload: OptionalText = "",
    stagger: OptionalText = "",
    sums_dtype: OptionalText = "",
    fit: OptionalText = "",
    reserve: OptionalText = "",
    share: OptionalFloat = None,
    owners: Flag = False,
    json: Flag = False,
    markdown: OptionalPath = None,
) -> None:
    """Estimate what a method costs on a model and many ranks: memory, FLOPs, bytes sent, owners.

    Nothing is trained and no weights are allocated: models are built on the meta device. Each
    matrix has one owner among the ranks, which keeps its state and computes its step; see
    docs/scaling.md.

    Args:
        name: character (the paper's model), gpt2-124m, gpt2-medium, gpt2-xl, llama-7b, llama-8b or
            llama-70b.
        model: Your own model instead: package.module:function, which returns a torch module.
        input: Shape of an input of --model, such as 1,1024. One forward pass on the meta device
            then finds the layers that share an input. Without it none do.
        ranks: Number of ranks.
        shards: Ranks that hold one copy of the model together: 1 for DDP, all ranks for FSDP2. With
            --tensor-parallel, ranks over which fully_shard divides what each of them has.
        tensor_parallel: Number of ranks that divide each layer, as parallelize_module does it.
        tensor_parallel_mode: What a matrix is then: blocks (the part that a rank has) or exact (the
            whole weight, gathered at its owner). Default: blocks.
        colwise: Layers whose outputs are divided: patterns of module names separated by commas,
            such as '*.q_proj,*.up_proj'. Default: those of the usual plan of the named model.
        rowwise: Layers whose inputs are divided, such as '*.o_proj,*.down_proj'.
        shared_inputs: Divided layers that read one tensor get one DTensor, as PrepareModuleInput
            makes it, and share its sum. Default: each makes a DTensor of its own.
        replicate: Every rank computes every step; there are no owners.
        routes: Treatments of parameters by name, such as '*.w=matrix,out.*=adamw'. Default: by
            rules.
        optimizers: Names separated by commas; gomuon methods lists all names.
        refresh_every: K, for every method that has one. Default: the method's own.
        rows: Use at most this many rows of a step for statistics, taken as one forward pass.
        token_stride: Use only every n-th position for statistics.
        tokens: Tokens (or images) per rank and step. Default: those of the named model.
        dtype: Of weights and gradients: float32, bfloat16, float16 or float64.
        polar: Method for polar factors; the default is the one for accelerators.
        state_dtype: Of momentum, factors and maps between steps: bfloat16 or int8.
        offload: What is kept on the host: factors, or maps for both. Default: nothing.
        stagger: Whether refreshes take turns, a K-th of the units at each step: on or off. Default:
            on where several ranks share the work.
        sums_dtype: In which captured sums travel between ranks: bfloat16. Default: float32 or
            wider, as they are computed.
        fit: Memory of a rank, such as 80GB or 79.5GiB: find the first settings that fit into it.
        reserve: With --fit: memory to leave free for activations and everything else that is not
            counted. Default: a quarter of --fit.
        share: With --fit: the most work, amortised, in per cent of the model's own. Default: any.
        owners: Show all owners, not only the first eight.
        json: Print everything as JSON.
        markdown: Write the tables of docs/scaling.md into this page, between its markers.
    """
    if markdown is not None:
        scaling_page.write(markdown)
        return
    for flag, value in (
        ("ranks", ranks),
        ("shards", shards),
        ("tensor-parallel", tensor_parallel),
        ("refresh-every", refresh_every),
        ("rows", rows),
        ("token-stride", token_stride),
        ("tokens", tokens),
    ):
        if value is not None:
            require_whole(f"--{flag}", value)
    parts = tensor_parallel or 1
    if ranks % (shards * parts):
        together = f"--shards ({shards})" + f" × --tensor-parallel ({parts})" * (parts > 1)
        raise LabError(f"--ranks ({ranks}) must be a multiple of {together}")
    if replicate and shards > 1:
        raise LabError(
            f"--replicate needs --shards 1, not {shards}: every rank must have the whole model"
        )
    methods = [method for method in get_args(PolarMethod) if method != "auto"]
    if polar not in methods:
        raise unknown_name("polar method", polar, methods)
    if state_dtype not in ("", *STATE_DTYPES):
        raise unknown_name("state dtype", state_dtype, STATE_DTYPES)
    if offload not in ("", *OFFLOADS):
        raise unknown_name("part of the state", offload, OFFLOADS)
    if stagger not in TURNS:
        raise unknown_name("value of --stagger", stagger, [name for name in TURNS if name])
    if sums_dtype not in ("", *SUMS_DTYPES):
        raise unknown_name("dtype for sums", sums_dtype, SUMS_DTYPES)
    if replicate and sums_dtype:
        raise LabError(f"--sums-dtype {sums_dtype} needs owners, so not --replicate")
    bounds = _bounds(fit, reserve, share)
    mesh = Mesh(ranks // (shards * parts), shards, parts)
    mode = _tensor_mode(tensor_parallel, tensor_parallel_mode, mesh, replicate)
    if bool(name) == bool(model):
        raise LabError(
            "give one model: a name such as gpt2-124m, or --model package.module:function"
        )
    if input and not model:
        raise LabError(f"--input {input!r} needs --model; {name!r} has its own input")
    plan = _tensor_plan(name, colwise, rowwise, shared_inputs, tensor_parallel)
    treatments = _routes(routes)
    planned = (
        planned_model.users_model(model, input, tokens, dtype)
        if model
        else planned_model.published_model(name, tokens, dtype)
    )
    planned = replace(planned, routes=treatments)
    if plan is not None:
        planned = planned.divided(plan, parts)
    ranks_used = RankLayout(mesh, replicate, exact=mode == "exact")
    given = given_settings(
        refresh_every=refresh_every,
        rows=rows,
        token_stride=token_stride,
        polar=polar,
        state_dtype=state_dtype or None,
        offload=offload or None,
        stagger=TURNS[stagger],
        sums_dtype=sums_dtype or None,
    )
    if bounds is not None:
        _fit(fit_methods(planned, ranks_used, optimizers, bounds, given), json)
        return
    comparison = compare_costs(planned, ranks_used, optimizers, given)
    if json:
        sys.stdout.write(jsons.dumps(comparison.as_dict(), indent=2) + "\n")
    else:
        print_comparison(comparison, SafeConsole(), owners)


def _tensor_mode(parts: int | None, mode: str, mesh: Mesh, replicate: bool) -> str:
    """What --tensor-parallel-mode says; "" if no layer is divided."""
    if mode not in ("", *TENSOR_MODES):
        raise unknown_name("value of --tensor-parallel-mode", mode, TENSOR_MODES)
    if mode and parts is None:
        raise LabError(f"--tensor-parallel-mode {mode} needs --tensor-parallel, a number of ranks")
    if mesh.parts == 1:
        return ""
    if mode == "exact" and replicate:
        raise LabError(
            "--replicate is not possible with --tensor-parallel-mode exact: no rank has whole "
            "matrices, so they need owners"
        )
    if mode != "exact" and mesh.replicas > 1 and mesh.shards > 1:
        raise LabError(
            f"{mesh.replicas} replicas × {mesh.shards} shards × {mesh.parts} parts are possible "
            "only with --tensor-parallel-mode exact; blocks need --shards 1, or "
            f"{mesh.replicas * mesh.shards}"
        )
    return mode or "blocks"


def _tensor_plan(
    name: str, colwise: str, rowwise: str, shared_inputs: bool, parts: int | None
) -> TensorPlan | None:
    """Which layers are divided; None if none are."""
    given = {"--colwise": colwise, "--rowwise": rowwise, "--shared-inputs": shared_inputs}
    if parts is None:
        for flag, value in given.items():
            if value:
                raise LabError(f"{flag} needs --tensor-parallel, a number of ranks")
    if parts is None or parts == 1:
        return None
    usual = CONFIGURATIONS[name].division if name in CONFIGURATIONS else None
    if colwise or rowwise:
        usual = TensorPlan(_names(colwise), _names(rowwise))
    if usual is None:
        about = f"{name!r} has no usual plan" if name else "a model of your own has no usual plan"
        raise LabError(
            f"{about}: say with --colwise and --rowwise which layers {parts} ranks divide, by "
            "patterns of module names such as '*.q_proj,*.up_proj'"
        )
    return replace(usual, shares_inputs=shared_inputs)


def _routes(text: str) -> Mapping[str, Treatment] | None:
    """The patterns and treatments of --routes."""
    found: dict[str, Treatment] = {}
    for part in _names(text):
        pattern, equals, word = part.rpartition("=")
        treatment = next((one for one in get_args(Treatment) if one == word.strip()), None)
        if not (pattern and equals) or treatment is None:
            raise LabError(
                f"--routes {part!r} is not understood; write pattern=treatment, with one of "
                f"{', '.join(get_args(Treatment))}"
            )
        found[pattern.strip()] = treatment
    return found or None


def _names(text: str) -> tuple[str, ...]:
    """The parts of a text that commas separate."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _bounds(fit: str, reserve: str, share: float | None) -> Bounds | None:
    """What --fit, --reserve and --share say; None without --fit."""
    if not fit:
        for flag, value in (("--reserve", reserve), ("--share", share)):
            if value not in ("", None):
                raise LabError(f"{flag} {value} needs --fit, the memory of a rank, such as 80GB")
        return None
    memory = parse_bytes("--fit", fit)
    reserved = parse_bytes("--reserve", reserve) if reserve else round(RESERVED * memory)
    if reserved >= memory:
        raise LabError(f"--reserve {reserve or reserved} leaves nothing of --fit {fit}")
    if share is not None:
        require_positive("--share", share)
    return Bounds(memory, reserved, None if share is None else share / 100)


def _fit(found: Fitting, json: bool) -> None:
    """Print what fits, and fail if something does not."""
    if json:
        sys.stdout.write(jsons.dumps(found.as_dict(), indent=2) + "\n")
    else:
        print_fitting(found, SafeConsole())
    refused = [f"{fit.method}: {refusal(fit, found)}" for fit in found.methods if not fit.found]
    if refused:
        raise LabError("; ".join(refused))
