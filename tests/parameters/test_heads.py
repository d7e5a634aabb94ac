"""Output heads by rule: names, order of registration, and what is no head."""

from typing import Any

import pytest
from torch import nn

from gomuon import GoMuon
from gomuon.parameters.heads import heads_by_rule


class Model(nn.Module):
    """Layers in the given order, never called."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def conv(kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(4, 4, kernel)


def stack() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU(), linear())


def wide() -> nn.Linear:
    return nn.Linear(4, 6)


class OneHeadOfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = linear(), linear(), linear()


CASES: dict[str, tuple[Any, list[str]]] = {
    "last linear layer": ({"body": stack(), "out": linear()}, ["out"]),
    "heads registered first": ({"lm_head": linear(), "body": stack()}, ["lm_head"]),
    "several heads": ({"cls_head": linear(), "box_head": linear(), "a": linear()},
                      ["cls_head", "box_head"]),
    "actor-critic, layers": ({"body": stack(), "policy": linear(), "value": linear()},
                             ["policy", "value"]),
    "actor-critic, networks": ({"actor": stack(), "critic": stack()}, ["actor.2", "critic.2"]),
    "a value without a policy": ({"query": linear(), "value": linear(), "out": linear()}, ["out"]),
    "VAE": ({"encoder": stack(), "fc_mu": linear(), "fc_logvar": linear(), "decoder": stack()},
            ["fc_mu", "fc_logvar", "decoder.2"]),
    "VAE, latents registered last": ({"encoder": stack(), "decoder": stack(), "mu": linear(),
                                      "logvar": linear()}, ["decoder.2", "mu", "logvar"]),
    "1×1 convolution": ({"down": conv(), "up": conv(), "outc": conv(1)}, ["outc"]),
    "a larger convolution last": ({"down": conv(), "up": conv()}, []),
    "a first convolution named head": ({"head": conv(), "body": conv(), "tail": conv()}, []),
    "transposed convolution last": ({"fc": linear(), "a": conv(), "b": nn.ConvTranspose2d(4, 4, 2)},
                                    []),
    "time embedding": ({"conv_in": conv(), "time_mlp": stack(), "conv_out": conv()}, []),
    "time embedding registered last": ({"body": stack(), "final": linear(),
                                        "time_embedding": stack()}, ["final"]),
    "classifier of several layers": ({"features": conv(), "classifier": stack()}, ["classifier.2"]),
    "list of heads": ({"body": stack(), "heads": nn.ModuleList([linear(), stack()])},
                      ["heads.0", "heads.1.2"]),
    "heads of an attention": ({"heads": nn.ModuleList([OneHeadOfAttention()]), "proj": linear()},
                              ["proj"]),
    "inside numbered blocks": ({"blocks": nn.ModuleList([stack(), stack()])}, []),
    "named, inside numbered blocks": ({"blocks": nn.ModuleList([Model(a=linear(), score=linear())]),
                                       "norm": nn.LayerNorm(4)}, ["blocks.0.score"]),
    "distilled, each in a module": ({"a": stack(), "head": Model(head=stack(), head_dist=stack())},
                                    ["head.head.2", "head.head_dist.2"]),
    "names that end in _classifier": ({"cls_classifier": wide(), "distillation_classifier": wide(),
                                       "body": stack()},
                                      ["cls_classifier", "distillation_classifier"]),
    "a layer before the classifier": ({"body": stack(), "pre_classifier": wide(),
                                       "classifier": wide()}, ["classifier"]),
    "boxes and classes": ({"body": stack(), "class_labels_classifier": wide(),
                           "bbox_predictor": stack()},
                          ["class_labels_classifier", "bbox_predictor.2"]),
    "pooling before an unnamed head": ({"head": Model(attention=OneHeadOfAttention(), a=wide()),
                                        "projection": wide()}, ["projection"]),
    "registered first: questions": ({"qa_outputs": wide(), "body": stack()}, ["qa_outputs"]),
    "a module before the head": ({"body": stack(), "head": Model(dense=linear()),
                                  "classifier": wide()}, ["classifier"]),
    "the same without a head": ({"body": stack(), "head": Model(dense=linear())}, ["head.dense"]),
    "pooling by attention": ({"head": Model(attention=OneHeadOfAttention(), out=wide()),
                              "classifier": wide()}, ["classifier"]),
    "a policy with attention": ({"policy": Model(attention=OneHeadOfAttention(), out=wide()),
                                 "critic": wide()}, ["policy.out", "critic"]),
    "projections of two towers": ({"visual_projection": wide(), "text_projection": wide(),
                                   "body": stack()}, ["visual_projection", "text_projection"]),
    "a projection into a language model": ({"visual_projection": wide(), "body": stack(),
                                            "lm_head": wide()}, ["lm_head"]),
    "a head inside of attention": ({"attention": Model(v_head=linear()), "out": wide()}, ["out"]),
    "features named conv_head": ({"body": conv(), "conv_head": conv(1), "classifier": wide()},
                                 ["classifier"]),
    "named, inside and outside": ({"blocks": nn.ModuleList([Model(score=linear())]),
                                   "head": linear()}, ["head"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_heads(name: str) -> None:
    layers, expected = CASES[name]
    model = Model(**layers)
    heads = heads_by_rule(model)
    assert {n for n, module in model.named_modules() if module in heads} == set(expected)


def test_the_table_says_why() -> None:
    def reasons(model: nn.Module) -> dict[str, str]:
        return {row.name: row.reason for row in GoMuon(model).routing_table()}

    assert reasons(Model(a=linear(), lm_head=linear()))["lm_head.weight"] == (
        "output head (named lm_head)"
    )
    assert reasons(Model(a=linear(), b=linear()))["b.weight"] == (
        "output head (last linear layer registered)"
    )
    assert reasons(Model(a=linear(), actor=stack()))["actor.2.weight"] == (
        "output head (last of actor)"
    )
