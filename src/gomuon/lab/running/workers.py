"""Train several runs at the same time, each in its own process; none survives its parent."""

from __future__ import annotations

import collections
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from gomuon.lab.errors import Crashed, Interrupted, LabError
from gomuon.lab.experiments.own_methods import import_methods, imported
from gomuon.lab.experiments.plan import run_name
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.running.training import UpdateReport, train

# Torch imports its compiler when the first optimizer is created, which takes longer than a small
# run; the fork server imports it once for all runs.
PRELOAD = ["gomuon.lab.running.training", "torch._dynamo"]
REPORT_INTERVAL = 0.1  # seconds between two messages of a worker


class RunObserver(Protocol):
    """Is told about the progress of runs."""

    def skip(self, config: RunConfig) -> None: ...
    def begin(self, config: RunConfig) -> None: ...
    def update(self, config: RunConfig, progress: UpdateReport) -> None: ...
    def finish(self, config: RunConfig) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass
class _Worker:
    config: RunConfig
    process: Any  # a context's own Process class
    connection: Connection


def start_method() -> str:
    """A fork server imports torch once; forking a process that has computed is not safe."""
    return "spawn" if sys.platform == "win32" else "forkserver"


def run_all(
    configs: Sequence[RunConfig],
    root: Path,
    *,
    jobs: int,
    observer: RunObserver,
    data_dir: str | Path | None = None,
    method: str | None = None,
) -> None:
    """Train every configuration in ``root/<run name>``, ``jobs`` at the same time.

    Raises:
        Interrupted: on Ctrl-C, after every worker has written its checkpoint.
        LabError: a run was refused or killed; the others were stopped with a checkpoint.
        Crashed: a run failed.
    """
    context: Any = multiprocessing.get_context(method or start_method())
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    waiting = collections.deque(configs)
    active: list[_Worker] = []
    said: set[str] = set()  # many runs may have the same to say
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                active.append(_start(context, waiting.popleft(), root, data_dir))
                observer.begin(active[-1].config)
            wait([worker.connection for worker in active], timeout=0.5)
            for worker in list(active):
                if _listen(worker, observer, said):
                    active.remove(worker)
    except KeyboardInterrupt:
        _stop(active)
        raise Interrupted from None
    except BaseException:
        _stop(active)
        raise


def _start(context: Any, config: RunConfig, root: Path, data_dir: str | Path | None) -> _Worker:
    here, there = context.Pipe()
    name = run_name(config)
    process = context.Process(
        target=_work,
        args=(there, config, root / name, data_dir, imported(), Path.cwd()),
        name=name,
        daemon=True,
    )
    process.start()
    there.close()
    return _Worker(config, process, here)


def _listen(worker: _Worker, observer: RunObserver, said: set[str]) -> bool:
    """Read a worker's messages; True if its run has finished."""
    name = run_name(worker.config)
    try:
        while worker.connection.poll():
            kind, content = worker.connection.recv()
            if kind == "progress":
                observer.update(worker.config, content)
            elif kind == "note":
                if content not in said:
                    observer.note(content)
                said.add(content)
            elif kind == "finished":
                worker.process.join()
                observer.finish(worker.config)
                return True
            elif kind == "refused":
                raise LabError(content)
            else:
                raise Crashed(f"run {name} failed; this is a bug, please report it:\n{content}")
    except (EOFError, OSError):
        worker.process.join(timeout=5)
        code = worker.process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        raise LabError(
            f"the process of run {name} ended ({how}); nothing is lost: "
            "repeat the same command to continue"
        ) from None
    return False


def _stop(workers: Sequence[_Worker], patience: float = 60.0) -> None:
    """Ask every worker to save a checkpoint and wait; a second Ctrl-C ends them at once."""
    deadline = time.monotonic() + patience
    try:
        for worker in workers:
            try:
                worker.connection.send("stop")
            except OSError:
                continue  # it is gone already
        for worker in workers:
            # Read its messages, else a worker could block while sending its last report.
            while worker.process.is_alive() and time.monotonic() < deadline:
                try:
                    if worker.connection.poll(0.1):
                        worker.connection.recv()
                except (EOFError, OSError):
                    break
            worker.process.join(timeout=max(0.1, deadline - time.monotonic()))
    except KeyboardInterrupt:
        pass
    finally:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.terminate()


def _work(
    connection: Connection,
    config: RunConfig,
    folder: Path,
    data_dir: str | Path | None,
    own_methods: Sequence[str] = (),
    place: Path | None = None,
) -> None:
    """The worker process: train and report, stop on request, and exit if the parent is gone."""
    # Ctrl-C reaches all processes of the group; the parent tells the workers what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    latest: dict[str, Any] = {}
    reported = 0.0

    def stop() -> bool:
        if parent is not None and not parent.is_alive():
            os._exit(1)  # the next start continues from the last checkpoint
        return connection.poll()

    def report(progress: UpdateReport) -> None:
        nonlocal reported
        latest.update(progress.metrics)
        now = time.monotonic()
        if now - reported >= REPORT_INTERVAL or progress.step == config.steps:
            reported = now
            connection.send(
                ("progress", UpdateReport(progress.step, progress.seconds, dict(latest)))
            )

    def say(text: str) -> None:
        connection.send(("note", text))

    try:
        if place is not None:
            os.chdir(place)  # where relative names of files, such as a user's task, are found
        import_methods(own_methods)
        if train(config, folder, data_dir=data_dir, report=report, stop=stop, say=say):
            connection.send(("finished", None))
    except LabError as error:
        connection.send(("refused", str(error)))
    except BrokenPipeError:
        os._exit(1)
    except Exception:
        connection.send(("failed", traceback.format_exc()))
