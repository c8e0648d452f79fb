"""The model of a run, with random or stored weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outpace.interop.classifier import read_classifier
from outpace.interop.custom_model import CustomObjective
from outpace.interop.huggingface import read_weights
from outpace.interop.models import OpenedModel
from outpace.interop.peft import merge_into
from outpace.jobs.inputs.inputs import TrainingInputs, starts_pretrained
from outpace.nn.classifier import ClassificationObjective, Classifier
from outpace.nn.lora import add_adapters, first_value
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed_precision import weights_dtype
from outpace.nn.transformer import Transformer, drawn_transformer, initial_value
from outpace.parallel.deferred_init import fills_later
from outpace.planner.model.shapes import parameter_shapes
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.precisions import PURE
from outpace.records.settings import TrainSettings


def build_objective(
    inputs: TrainingInputs,
    settings: TrainSettings,
    plan: Plan,
    compute_dtype: torch.dtype | None,
    device: torch.device,
) -> LanguageModelObjective | CustomObjective | ClassificationObjective:
    """Build the model and its loss on the device, with initial weights.

    `compute_dtype`: the dtype of a language model's matmuls (see `LanguageModelObjective`). A model
    that no rank will hold as a whole is built on the meta device: apply the layout, then `fill` it.
    """
    if inputs.custom_model is not None:
        return CustomObjective(inputs.custom_model).to(device)
    assert inputs.spec is not None and inputs.opened is not None
    place = _choose_drawing_place(plan, device)
    if inputs.labels is not None:
        classifier = _build_classifier(inputs.opened, inputs.spec, inputs.labels, settings, place)
        return ClassificationObjective(classifier).to(device)
    if inputs.is_transformer and fills_later(plan):
        with torch.device("meta"):
            empty = add_adapters(Transformer(inputs.spec), plan, settings.seed)
        return LanguageModelObjective(empty, plan.loss, compute_dtype, plan.compile)
    model = initial_model(inputs.opened, inputs.spec, settings, place)
    add_adapters(model, plan, settings.seed, device)
    return LanguageModelObjective(model, plan.loss, compute_dtype, plan.compile).to(device)


def _choose_drawing_place(plan: Plan, device: torch.device) -> "DrawingPlace":
    """Return the device and dtype in which to draw a model's random weights.

    The device is the GPU, if there is one. Weights that will be quantized to 4 bits are drawn on
    the CPU.
    """
    if device.type != "cuda" or plan.base == "nf4":
        return DrawingPlace()
    pure = weights_dtype(plan.precision) if plan.precision in PURE else None
    return DrawingPlace(device, pure or torch.float32)


def weights_of(
    inputs: TrainingInputs, settings: TrainSettings, plan: Plan, device: torch.device
) -> Callable[[str], torch.Tensor]:
    """Return a function that maps a parameter's name to its initial value, stored or drawn."""
    spec, opened = inputs.spec, inputs.opened
    assert spec is not None and opened is not None
    shapes, seed = parameter_shapes(spec), settings.seed
    stored = stored_weights(opened, spec) if starts_pretrained(opened, settings) else None

    def value_of(name: str) -> torch.Tensor:
        adapter = first_value(name, shapes, plan.lora_rank, seed)
        if adapter is not None:
            return adapter
        if stored is not None:
            return stored.pop(name)
        return initial_value(spec, seed, name, shapes[name], device)

    return value_of


@dataclass(frozen=True)
class DrawingPlace:
    """The device and dtype in which random weights are drawn."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a constant)
    dtype: torch.dtype = torch.float32


def initial_model(
    opened: OpenedModel, spec: ModelSpec, settings: TrainSettings, place: DrawingPlace
) -> Transformer:
    """Return the model with its stored weights, or with weights drawn from the seed."""
    if not starts_pretrained(opened, settings):
        return drawn_transformer(spec, settings.seed, place.device, place.dtype)
    return load_model(opened, spec)


def _build_classifier(
    opened: OpenedModel,
    spec: ModelSpec,
    labels: Sequence[str],
    settings: TrainSettings,
    place: DrawingPlace,
) -> Classifier:
    if not starts_pretrained(opened, settings):
        model = drawn_transformer(spec, settings.seed, place.device, place.dtype)
        return Classifier(model, len(labels), settings.seed)
    assert opened.weights is not None
    return read_classifier(opened.weights, spec, labels, settings.seed)


def load_model(opened: OpenedModel, spec: ModelSpec) -> Transformer:
    """Load stored weights into outpace's model, without drawing random ones first."""
    with torch.device("meta"):
        model = Transformer(spec)
    model.load_state_dict(stored_weights(opened, spec), assign=True)
    return model


def stored_weights(opened: OpenedModel, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the stored weights under outpace's names, with any adapter merged in."""
    assert opened.weights is not None
    weights = read_weights(opened.weights, spec)
    if opened.adapter is not None:
        merge_into(weights, opened.adapter, opened.weights)
    return weights
