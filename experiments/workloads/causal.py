"""Any pretrained causal language model of transformers, with its own tokenizer.

``smollm2/gsm8k`` is the model in ``--pretrained DIR``, where DIR is that folder (``.../smollm2``) or has it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from experiments.workloads.base import Options, WorkloadError
from experiments.workloads.language import CausalWorkload, LanguageSize
from experiments.workloads.weights import source


def _no_weights() -> nn.Module:
    raise WorkloadError("this workload has no model of its own. Give pretrained weights: --pretrained DIR.")


_SIZE = LanguageSize(
    build=_no_weights,
    parameters=0,  # known once it is loaded
    description="",
    length=256,
    batch_size=8,
    steps=500,
    lr=1e-4,
    lr_spread=(0.2, 0.5, 1.0, 3.0),  # fine-tunings differ more in this than training from scratch does
)


class PretrainedWorkload(CausalWorkload):
    """The loss is of responses only."""

    family, model_class = "causal LM", "AutoModelForCausalLM"


def find(name: str, options: Options | None) -> PretrainedWorkload | None:
    """Return the workload whose size is the name of the folder or hub repository in ``options.pretrained``."""
    size, _, dataset = name.partition("/")
    if options is None or not options.pretrained or dataset not in PretrainedWorkload.tasks:
        return None
    found = source(size, None, options)
    if found is None or found.rstrip("/").rpartition("/")[2] != size:
        return None
    return PretrainedWorkload(name, replace(_SIZE, description=size), dataset, options)
