"""Drafts on a model hub: what is read from there, and what is put there. ``HF_ENDPOINT`` names another hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark_train.errors import UserError
from dspark_train.progress import stage

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
WANTED = ("*.json", "*.safetensors", "*.yaml", "*.md", "*.jinja")
"""Files that are read from a hub: never code, never pickles."""


def local_folder(source: str) -> Path:
    """Folder that ``source`` names; a hub id is downloaded first.

    Args:
        source: a folder, ``owner/name``, or ``owner/name@revision``.

    Raises:
        UserError: neither a folder nor a hub id, or the hub does not give it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not _HUB_ID.fullmatch(source):
        raise UserError(f"draft {source}: no such folder, and no hub id (owner/name or owner/name@revision)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    name, _, revision = source.partition("@")
    with (
        stage(f"reading {source} from the hub"),
        _explained(f"draft {source}: no such folder here, and the hub did not give it"),
    ):
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(WANTED)))


def check_push(repository: str) -> None:
    """Ask the hub who we are, before there is anything to push.

    Raises:
        UserError: no ``owner/name``, no token, or one that the hub refuses.
    """
    if not _HUB_ID.fullmatch(repository) or "@" in repository:
        raise UserError(f"--push {repository}: a hub repository is named owner/name")
    from huggingface_hub import HfApi

    with _explained(f"--push {repository}: the hub did not take our token (`hf auth login`, or HF_TOKEN)"):
        HfApi().whoami()


def push(folder: Path, repository: str, private: bool) -> str:
    """Put a written draft on the hub in one commit: all of it, or nothing.

    Args:
        folder: of the draft.
        repository: ``owner/name``; made where it does not exist.
        private: of a repository that is made.

    Returns:
        Its address there.

    Raises:
        UserError: the hub refuses or breaks off; the folder stays as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi()
    with (
        stage(f"putting {folder.name} on the hub as {repository}"),
        _explained(f"--push {repository}: not pushed; {folder} is whole, run the same command again"),
    ):
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="A DSpark draft")
    return str(done.commit_url)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    import httpx
    from huggingface_hub import errors

    kinds = (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.LocalTokenNotFoundError,
        httpx.HTTPError,
    )
    try:
        yield
    except kinds as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"{what}: {lines[0] if lines else type(error).__name__}") from error
