"""The measurement of function capture compares two models that train alike."""

import torch

from gomuon import GoMuon
from gomuon.lab.bench import workloads
from tools.capture_cost import INTERVAL, as_functions, measure, routes


def test_both_models_capture_and_train_alike() -> None:
    workload = workloads.find("paper", "tiny")
    trained = []
    for change in (lambda model: model, as_functions):
        model = change(workload.make())
        optimizer = GoMuon(model, refresh_every=INTERVAL, routes=routes(model))
        for _ in range(INTERVAL + 1):
            optimizer.zero_grad()
            workload.loss(model, workload.batches[0]).backward()
            optimizer.step()
        trained.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_every_step_is_a_refresh_or_a_reuse() -> None:
    found = measure("tiny", cycles=2)
    assert (found["refresh"]["steps"], found["reuse"]["steps"]) == (2, 2 * (INTERVAL - 1))
    assert found["refresh"]["ratio"] > 0
