"""The wheel is built, installed into an environment of its own, and trains."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import gomuon

ROOT = Path(__file__).parents[1]
TRAIN = """
import importlib.metadata, pathlib, torch, gomuon
assert pathlib.Path(gomuon.__file__).is_relative_to({environment!r}), gomuon.__file__
assert importlib.metadata.version("gomuon") == {version!r}
nn = torch.nn
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 2))
optimizer = gomuon.GoMuon(model, lr=0.02)
x, y = torch.randn(32, 8), torch.randint(2, (32,))
losses = []
for _ in range(8):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0]
"""


def run(*words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"gomuon", f"gomuon-{gomuon.__version__}.dist-info"}
    assert "gomuon/py.typed" in names
    sources = {path.relative_to(ROOT / "src").as_posix() for path in ROOT.glob("src/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


@pytest.mark.slow
def test_it_trains_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "clean"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # torch comes from here. A path in a .pth file brings packages, but not the paths that their own
    # .pth files name, so this repository, which is installed as such a path, is not seen.
    (Path(site) / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    run(*pip, "--no-index", wheel)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = TRAIN.format(environment=str(environment), version=gomuon.__version__)
    run(python, "-c", script, cwd=tmp_path, env=clean)
    said = run(environment / "bin" / "gomuon", "--version", cwd=tmp_path, env=clean)
    assert gomuon.__version__ in said
