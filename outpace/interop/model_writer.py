"""Writer of outpace's models as Hugging Face directories."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from outpace.interop.atomic_folder import whole_folder
from outpace.interop.config import CONFIG_FILE, OWN_TYPE, read_config
from outpace.interop.config_check import quiet_transformers
from outpace.interop.config_writer import add_old_rotary_keys, hf_config
from outpace.interop.origin import (
    TokenIds,
    append_stop_ids,
    read_token_ids,
    write_generation_config,
)
from outpace.interop.tensor_names import Naming, group, tensor_naming
from outpace.interop.weight_files import INDEX
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec

MAX_SHARD_BYTES = 5 * 10**9


def write_model(
    directory: Path,
    spec: ModelSpec,
    state_dict: Mapping[str, Tensor],
    tokenizer_save: Callable[[Path], None] | None,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    origin: Path | None = None,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write config.json, generation_config.json, the weights in `dtype` and the tokenizer.

    `origin` is the directory from which the model and the tokenizer were loaded; its special ids
    and generation settings are kept. `stop_ids` end answers, in addition to the ids that end texts.

    `AutoModelForCausalLM.from_pretrained` (AutoModelForMaskedLM for BERT) loads the result. A spec
    without an equivalent architecture in transformers is written in outpace's own format, which
    `spec_from_hf` and `read_weights` read. The directory is written completely or not at all.
    Memory use exceeds `state_dict` by one shard. Raises BadInputError if the directory cannot be
    written.
    """
    with whole_folder(directory, CONFIG_FILE) as folder:
        ids: dict[str, TokenIds] = {}
        given = {} if origin is None else read_config(origin)
        if tokenizer_save is not None:
            tokenizer_save(folder)
            ids |= special_ids(folder)
        if origin is not None:
            ids |= read_token_ids(origin, given)
        if stop_ids:
            ids["eos_id"] = append_stop_ids(ids.get("eos_id"), stop_ids)
        config = write_config(folder, spec, ids, dtype, given=given)
        if config is not None and spec.causal:
            write_generation_config(folder, config, origin)
        model_type = OWN_TYPE if config is None else config.model_type
        write_weights(folder, state_dict, tensor_naming(model_type), dtype, max_shard_bytes)


def special_ids(folder: Path) -> dict[str, int | None]:
    """Return the special ids of the tokenizer in `folder`, as loaded by transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    return {
        "eos_id": tokenizer.eos_token_id,
        "bos_id": tokenizer.bos_token_id,
        "pad_id": tokenizer.pad_token_id,
    }


def write_config(
    folder: Path,
    spec: ModelSpec,
    ids: Mapping[str, TokenIds],
    dtype: torch.dtype,
    change: Callable[[Any], None] = lambda config: None,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Any | None:
    """Write config.json after applying `change`; return the config, or None in outpace's format.

    `given` holds the values of the config.json from which the spec was read.
    """
    try:
        config = hf_config(spec, **ids, dtype=str(dtype).removeprefix("torch."), given=given)
    except BadInputError:
        values = {"model_type": OWN_TYPE, "spec": spec.model_dump(mode="json")}
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        return None
    change(config)
    with quiet_transformers():
        config.save_pretrained(str(folder))
    path = folder / CONFIG_FILE
    values = json.loads(path.read_text(encoding="utf-8"))
    add_old_rotary_keys(values)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return config


def write_weights(
    folder: Path,
    state_dict: Mapping[str, Tensor],
    naming: Naming | None,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors under a family's stored names, in files of at most `max_shard_bytes`.

    `naming` is the family's naming, or None for outpace's names.
    """
    groups = group(state_dict, naming)
    if naming is not None and naming.head_bias and naming.tied_head in groups:
        # An untied BERT uses the decoder's bias.
        state_dict = {**state_dict, "decoder_bias": state_dict["head_bias"].clone()}
        groups[naming.tied_head.replace("weight", "bias")] = ["decoder_bias"]
    planned = {
        stored: _join_parts([state_dict[name].to("meta", dtype) for name in names], stored, naming)
        for stored, names in groups.items()
    }
    split = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_bytes)
    for file, stored_names in split.filename_to_tensors.items():
        shard = {
            stored: _join_parts(
                [_cast_on_cpu(state_dict[name].detach(), dtype, stored) for name in groups[stored]],
                stored,
                naming,
            )
            for stored in stored_names
        }
        save_file(shard, str(folder / file), metadata={"format": "pt"})
    if split.is_sharded:
        index: dict[str, Any] = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _cast_on_cpu(tensor: Tensor, dtype: torch.dtype, stored: str) -> Tensor:
    cast = tensor.to("cpu", dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and not bool(torch.isfinite(cast).all()):
        source = tensor.cpu()
        lost = source[torch.isfinite(source) & ~torch.isfinite(cast)]
        if lost.numel():
            largest = float(lost.abs().max())
            raise BadInputError(
                f"{stored} has values up to {largest:.4g}, which fp16 cannot hold (at most "
                f"{torch.finfo(dtype).max:,.0f}). Write the weights in bf16 or fp32."
            )
    return cast


def _join_parts(parts: list[Tensor], stored: str, naming: Naming | None) -> Tensor:
    """Concatenate tensors that are stored as one, and transpose them if the family does."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if naming is not None and naming.is_transposed(stored):
        whole = whole.t()
    return whole.contiguous()
