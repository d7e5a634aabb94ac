"""Command lines at random: every command, every flag, values that fit and values that do not.

Whatever fits is tiny, so that no line starts a long training: a flag's good values are small, and
its bad ones are refused.
"""

from __future__ import annotations

import random

LONG = "x" * 5000
# No word leads further out than the folder of its case: a command that is told to write there does.
HOSTILE = (
    *("", " ", ",", "=", "-", "--", "\x1b[31mred\x1b[0m", "\x9b31m", "a\x07b\rc", "a\nb", "\udcff"),
    *("名前", "\u202egnp", "..", "/dev/null", LONG, "x" * 300, "a=b=c", "%s{0}", "[bold]x", "~"),
    *("nan", "-inf", "1e999", "0", "-1", "None", "true", "\\", "'", '"; quoted', "*", "$HOME"),
)
NUMBERS = ("0", "-1", "-8", "nan", "inf", "1.5", "", "9" * 400, "9" * 30, "100000000", "x", "0x10")
PLACES = (
    *("campaign", "begun", "campaign/runs", "campaign/runs/adamw-s0", "bench", "data"),
    *("missing", "missing/deep/er", "selection.json", "garbage", "deep.json", "link", "linked"),
    *("page.md", ".", "sweep", "closed", "\x1b[31mfolder", "x" * 300, "pipe"),
)
WORLD = PLACES[:6]
OPTIMIZERS = ("adamw", "go-muon,adamw", "muon", "adamw,adamw", "adam", "muon,", ",", "soap")
# Classes from outside, most of which are no task and no optimizer.
OUTSIDE = (
    *("torch.optim:SGD", "torch.optim:LBFGS", "torch.nn:Linear", "json:loads", "no.such:Thing"),
    *(":", "a:b:c", "..:x", "garbage:x", "gone.py:Thing", "missing/gone.py:Thing", "\0.py:x"),
    *("x" * 300 + ".py:Thing", "tests.lab.helpers.own_classes:Line"),
)
OPTIONS = (
    *("adamw.amsgrad=True", "adamw.eps=nan", "adamw.x=1", "adamw=1", "adamw.=1", ".x=1", ","),
    *("adamw.betas=(.9,.95)", "adamw.betas=(.9", "adamw.eps=" + "[" * 300, "muon.x=1"),
)
RATES = ("adamw=.02", "adamw=0", "adamw=nan", "adamw=1e-400", "adamw", "=.1", "muon=1", ",", "a=b")
SEEDS = (
    "0",
    "0,1",
    "0-1",
    "1-0",
    "0,0",
    "0-99999",
    "-1",
    "9" * 25,
    "x",
    "0,,1",
    "18446744073709551616",
)
SHAPE = {
    "--width": ("8", "4", "30"),
    "--layers": ("1",),
    "--heads": ("2", "1", "3"),
    "--hidden": ("8", "4"),
    "--modulus": ("5", "3", "1", "2"),
    "--length": ("8", "1"),
    "--batch": ("2", "1"),
}
TINY = {
    "--width": "8",
    "--layers": "1",
    "--heads": "2",
    "--hidden": "8",
    "--modulus": "5",
    "--length": "8",
    "--batch": "2",
    "--threads": "1",
    "--jobs": "1",
    "--steps": "2",
    "--data-dir": "data",
}
RACE = {
    **TINY,
    "--optimizers": "adamw",
    "--task": "grokking",
    "--seeds": "0",
    "--out": "begun",
}

SWEEP = {**TINY, "--optimizers": "adamw", "--grid": "2", "--out": "sweep"}
BENCH = {"--cycles": "1", "--threads": "1", "--models": "mlp", "--arms": "muon", "--out": "bench"}

Flags = dict[str, str | None]


def words_of(flags: dict[str, str]) -> list[str]:
    return [word for pair in flags.items() for word in pair]


def good_line(generator: random.Random) -> list[str]:
    """A command that is carried out where nothing is damaged."""
    return generator.choice(GOOD)


def line(generator: random.Random) -> list[str]:
    """A command with its words, any of which may be wrong."""
    command, flags, words = generator.choice(COMMANDS)(generator)
    if generator.random() < 0.15:
        words = [*words, generator.choice(HOSTILE)]
    if generator.random() < 0.1:
        flags[generator.choice(("--nothing", "--out", "--help", "--st\x1beps", "--seeds"))] = (
            generator.choice((None, *HOSTILE))
        )
    told = []
    for flag, value in flags.items():
        if value is None:
            told.append(flag)
        else:
            told += [f"{flag}={value}"] if generator.random() < 0.1 else [flag, value]
    return [command, *words, *told]


def change(generator: random.Random, flags: Flags, pools: dict[str, tuple[str, ...]]) -> Flags:
    """Some flags with other values, mostly of their own kind; never fewer than there were."""
    for flag in generator.sample(sorted(pools), min(generator.choice((0, 1, 1, 2)), len(pools))):
        foreign = generator.random() < 0.3
        flags[flag] = generator.choice(HOSTILE if foreign else pools[flag])
    return flags


def runs(generator: random.Random) -> dict[str, tuple[str, ...]]:
    shape = {flag: (*good, *NUMBERS) for flag, good in SHAPE.items()}
    return {
        **shape,
        "--steps": ("1", "3", *NUMBERS),
        "--threads": ("1", *NUMBERS),
        "--jobs": ("1", "2", *NUMBERS),
        "--out": PLACES,
        "--data-dir": PLACES,
        "--seeds": SEEDS,
    }


def switches(generator: random.Random, flags: Flags, *names: str) -> None:
    for name in names:
        if generator.random() < 0.2:
            flags[name] = None


def race(generator: random.Random) -> tuple[str, Flags, list[str]]:
    flags: Flags = dict(RACE)
    if generator.random() < 0.4:
        return "race", flags, []  # continues what was begun, whatever became of it
    pools = runs(generator) | {
        "--task": ("grokking", "ptb", "groking", *OUTSIDE),
        "--optimizers": (*OPTIMIZERS, *OUTSIDE),
        "--options": OPTIONS,
        "--lr": RATES,
        "--adamw-lr": ("0.01", *NUMBERS),
        "--selection": ("selection.json", "sweep/selection.json", *PLACES),
    }
    switches(generator, flags, "--timing")
    return "race", change(generator, flags, pools), []


def tune(generator: random.Random) -> tuple[str, Flags, list[str]]:
    flags: Flags = dict(SWEEP)
    pools = runs(generator) | {
        "--task": ("grokking", "ptb", "groking", *OUTSIDE),
        "--optimizers": ("adamw", "muon", ",", "adam", *OUTSIDE),
        "--options": OPTIONS,
        "--grid": ("1", "2", *NUMBERS),
        "--ratio": ("2", "1", "1.0000001", "1e300", *NUMBERS),
        "--rates": ("adamw=.01/.02", "adamw=.01/.01", "adamw=", "adamw=//", ","),
        "--momenta": (".8", ".8,.9", "1", "-1", "nan", ","),
    }
    switches(generator, flags, "--dry-run")
    return "tune", change(generator, flags, pools), []


def reproduce(generator: random.Random) -> tuple[str, Flags, list[str]]:
    flags: Flags = {"--steps": "2", "--threads": "1", "--jobs": "1", "--out": "repeated"}
    pools = {flag: pool for flag, pool in runs(generator).items() if flag not in SHAPE}
    pools["--selection"] = ("selection.json", *PLACES)
    switches(generator, flags, "--quick", "--dry-run")
    name = generator.choice(("made", "made", "made", "all", "pbt", *HOSTILE))
    return "reproduce", change(generator, flags, pools), [name]


def report(generator: random.Random) -> tuple[str, Flags, list[str]]:
    return "report", {}, [generator.choice((*WORLD[:4], *WORLD[:4], *PLACES, *HOSTILE))]


def data(generator: random.Random) -> tuple[str, Flags, list[str]]:
    flags: Flags = {}
    switches(generator, flags, "--fetch")
    words = generator.choice(([], ["ptb"], ["ptb", "shakespeare"], ["nothing"]))
    return "data", change(generator, flags, {"--data-dir": PLACES}), list(words)


def methods(generator: random.Random) -> tuple[str, Flags, list[str]]:
    flags: Flags = {}
    switches(generator, flags, "--markdown")
    return "methods", flags, generator.choice(([], ["go-muon"], ["muon-qk"], ["adam"]))


def bench(generator: random.Random) -> tuple[str, Flags, list[str]]:
    if generator.random() < 0.4:
        return "bench", {"--page": None, "--out": generator.choice(("bench", *PLACES))}, []
    flags: Flags = {"--quick": None, "--no-scaling": None, **BENCH}
    switches(generator, flags, "--fresh", "--fresh")
    pools = {
        "--models": ("mlp", "overhead", "mlp,mlp", "mpl", ","),
        "--arms": ("muon", "go-muon-4", "muon,muon", "mouon", ","),
        "--cycles": ("1", *NUMBERS),
        "--threads": ("1", *NUMBERS),
        "--out": PLACES,
    }
    return "bench", change(generator, flags, pools), []


def plan(generator: random.Random) -> tuple[str, Flags, list[str]]:
    words = generator.choice((["character"], ["character"], [], ["gpt3"]))
    flags: Flags = {}
    if not words:
        flags["--model"] = generator.choice(
            (
                *(
                    "torch.nn:Identity",
                    "torch:nothing",
                    ":",
                    ".:x",
                    "a..b:c",
                    "garbage:x",
                    "no.such:x",
                ),
                *("tests.faults.command_worlds:small", "tests.faults.command_worlds:raising"),
            )
        )
    pools = {
        "--input": ("1,8", "8", "1,8,8,8", "0", "-1,8", "9" * 30, "9" * 5000, "1,,8", "x"),
        "--ranks": ("1", "4", *NUMBERS),
        "--shards": ("1", "2", *NUMBERS),
        "--optimizers": ("go-muon", "muon,kfac", "adamw", ",", "soap", "adam"),
        "--refresh-every": ("1", "4", *NUMBERS),
        "--token-stride": ("1", "4", *NUMBERS),
        "--tokens": ("1", "1000", *NUMBERS),
        "--dtype": ("float32", "bfloat16", "float64", "int8"),
        "--polar": ("svd", "auto", "fast", "polar"),
    }
    switches(generator, flags, "--replicate", "--owners", "--json")
    if generator.random() < 0.1:
        flags["--markdown"] = generator.choice(PLACES)
    return "plan", change(generator, flags, pools), list(words)


def verify(generator: random.Random) -> tuple[str, Flags, list[str]]:
    pools = {"--device": ("cpu", "meta", "cuda:9", "nowhere"), "--seeds": ("1", *NUMBERS)}
    return "verify", change(generator, {"--seeds": "1", "--quick": None}, pools), []


def nonsense(generator: random.Random) -> tuple[str, Flags, list[str]]:
    words = [generator.choice(HOSTILE) for _ in range(generator.randint(0, 3))]
    # Not race, which without words is a race of minutes.
    return generator.choice(("", "--help", "dance", "plan", "report", "\x1b]0;x\x07")), {}, words


COMMANDS = (
    *(race, race, race, race, tune, reproduce, report, report, report, data, methods),
    *(bench, bench, plan, plan, verify, nonsense),
)
GOOD = (
    ["race", *words_of(RACE)],
    ["race", *words_of(RACE)],
    ["race", *words_of(RACE | {"--out": "campaign"}), "--timing"],
    ["race", *words_of(TINY), "--selection", "selection.json", "--out", "again"],
    ["tune", *words_of(SWEEP)],
    ["reproduce", "made", "--threads", "1", "--selection", "selection.json", "--out", "again"],
    ["report", "campaign"],
    ["report", "campaign"],
    ["report", "sweep"],
    ["report", "begun"],
    ["report", "campaign/runs/adamw-s0"],
    ["bench", "--page", "--out", "bench"],
    ["bench", "--quick", "--no-scaling", *words_of(BENCH)],
    ["data", "--data-dir", "data"],
)
