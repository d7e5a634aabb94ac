"""A recipe: what a method does at each station of the step, and its settings. It is data."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gomuon.errors import describe_value
from gomuon.geometry.base import Geometry
from gomuon.parameters.groups import groups_of
from gomuon.parameters.routing import RoutingTable
from gomuon.parameters.specs import LayerSpec
from gomuon.recipes import stations
from gomuon.recipes.stations import EVERY_STEP, Clock, Decay, Direction, Scale, Source, Trust
from gomuon.recipes.work import StepWork
from gomuon.settings import ADAMW_DEFAULTS, COMMON, Settings, check_settings, python_value


@dataclass(frozen=True)
class ModelUse:
    """How a method uses a model, if it differs from the default.

    Attributes:
        route: changes the routing of a model's parameters.
        groups: the parameter groups of a routed model, given the constructor's settings.
        specs: more LayerSpecs, given the model and the settings.
        needs_model: the error if bare parameters are given; empty if they are allowed.
    """

    route: Callable[[nn.Module, RoutingTable], RoutingTable] = lambda model, table: table
    groups: Callable[[RoutingTable, Mapping[str, Any]], list[dict[str, Any]]] = (
        lambda table, settings: groups_of(table, settings)
    )
    specs: Callable[[nn.Module, Mapping[str, Any]], dict[Tensor, LayerSpec]] = (
        lambda model, settings: {}
    )
    needs_model: str = ""


PLAIN_USE = ModelUse()


@dataclass(frozen=True)
class OfficialCode:
    """Public code that a method is held to, and how both make the same updates.

    Attributes:
        where: repository and file: "owner/name, path/file.py".
        commit: the commit that was read, or "" if it is unknown.
        ours: our settings with which both are equal; {} if our defaults are. None: no settings make
            them equal, and the recipe's `departures` say why.
        theirs: how the public code is to be set, if not at its defaults.
    """

    where: str
    commit: str = ""
    ours: Mapping[str, Any] | None = field(default_factory=dict)
    theirs: str = ""


@dataclass(frozen=True)
class OlderCheckpoints:
    """How checkpoints are read that were written before the method became what it is.

    Attributes:
        lacking: a setting that they do not have, and newer ones do.
        name: the method's name in them, if it had another one.
        settings: the values that stand for what they do not say.
        changed: what goes on differently, for a warning; "" if training continues as it was.
    """

    lacking: str
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    changed: str = ""

    def include(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the checkpoint with these parameter groups is one of them."""
        return bool(groups) and all(self.lacking not in group for group in groups)


@dataclass(frozen=True)
class Recipe:
    """What a method does at each station, its settings, and where it comes from.

    Attributes:
        name: the class's name.
        geometry: where the maps come from.
        clock: when the maps are renewed.
        source: gradient to source.
        direction: source to direction.
        trust: couples the directions of a group's layers.
        scale: direction to update.
        rms_scale: the same with `lr_scale="adamw"`.
        decay: weight decay.
        settings: the method's own settings, with defaults and kinds.
        formula: one line for the table of methods.
        origin: the authors, and the code or paper that it follows.
        official: public code that the method is held to, the one it follows first; () if there is
            none.
        departures: where it differs from that code on purpose, whatever the settings; one sentence
            each.
        older: how checkpoints from before it changed are read; None if it did not.
        joins_bias: whether biases join their weights as a column.
        observes_first: number of first steps that only observe a layer and do not move it.
        model_use: how the method uses a model.
        presets: settings that belong together, by name; see `values`.
        work: what it computes and keeps, for `gomuon plan`; None if it does not say.
    """

    name: str
    geometry: Geometry
    source: Source
    direction: Direction
    scale: Scale
    settings: Settings
    formula: str
    origin: str
    official: tuple[OfficialCode, ...] = ()
    departures: tuple[str, ...] = ()
    clock: Clock = EVERY_STEP
    trust: Trust = stations.each_alone
    rms_scale: Scale = stations.rms_scale
    decay: Decay = stations.decayed
    older: OlderCheckpoints | None = None
    joins_bias: bool = False
    observes_first: int = 0
    model_use: ModelUse = PLAIN_USE
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    work: StepWork | None = None

    @property
    def has_geometry(self) -> bool:
        """Whether it has maps, however simple, that are renewed by its clock."""
        made = ("refresh", "observe", "renew", "after")
        kind = type(self.geometry)
        return any(getattr(kind, name) is not getattr(Geometry, name) for name in made)

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings' defaults."""
        return {name: setting.default for name, setting in self.settings.items()}

    def check_known(self, settings: Mapping[str, Any]) -> None:
        """Raise a TypeError for a setting this method does not have."""
        for name in settings:
            if name not in self.settings:
                raise TypeError(f"{self.name} has no setting {name!r}{self._hint(name)}")

    def _hint(self, unknown: str) -> str:
        """What a name that is no setting was probably meant to be."""
        if unknown in ADAMW_DEFAULTS:  # as when torch.optim.AdamW is replaced
            return f"; for what AdamW updates, pass adamw={{{unknown!r}: …}}"
        near = difflib.get_close_matches(unknown, self.settings, n=1)
        return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(self.settings)}"

    def preset(self, name: str | None) -> Mapping[str, Any]:
        """The settings of a preset; none for None.

        Raises:
            ValueError: the method has no preset of this name.
        """
        if name is None:
            return {}
        if not isinstance(name, str) or name not in self.presets:
            known = ", ".join(map(repr, self.presets)) or "none"
            raise ValueError(f"{self.name} has no preset {describe_value(name)}; it has {known}")
        return self.presets[name]

    def values(
        self, given: Mapping[str, Any], lr: Any, adamw: Any, preset: str | None, **common: Any
    ) -> dict[str, Any]:
        """The constructor's settings, complete and checked: given ones, the preset's, defaults.

        Raises:
            TypeError: the method does not have a given setting.
            ValueError: a value is out of range, or the preset is unknown.
        """
        self.check_known(given)
        chosen = {**self.defaults, **self.preset(preset)}
        values = {
            **chosen,
            **given,
            "lr": chosen["lr"] if lr is None else lr,
            "adamw": adamw if adamw is not None else {},
            **common,
        }
        check_settings(values, self.settings)
        own = dict(values["adamw"])
        if values.get("lr_scale") == "adamw":  # one rate and one decay for all parameters
            if lr is None:
                values["lr"] = own.get("lr", ADAMW_DEFAULTS["lr"])
            shared = {name: python_value(values[name]) for name in ("lr", "weight_decay")}
            own = {**shared, **own}
        return {**values, "adamw": {**ADAMW_DEFAULTS, **own}}

    def signature(self) -> inspect.Signature:
        """The constructor's signature for a class with this recipe."""
        both, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        common = {name: setting.default for name, setting in COMMON.items()}
        keywords = {
            **self.defaults,
            **({"preset": None} if self.presets else {}),
            "adamw": None,
            "routes": None,
            "specs": None,
            "example_input": None,
            "overrides": None,
            "model": None,
            **common,
            "process_group": None,
        }
        lr = keywords.pop("lr")
        return inspect.Signature(
            [
                inspect.Parameter("params", both),
                inspect.Parameter("lr", both, default=lr),
                *(inspect.Parameter(name, keyword, default=v) for name, v in keywords.items()),
            ]
        )
