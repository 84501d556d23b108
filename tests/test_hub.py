"""Drafts go to a hub and come from it; what the hub refuses is one line, and nothing is half there."""

import os
import subprocess
import sys

import hub_server
import pytest
import yaml

from dspark_train.errors import UserError
from dspark_train.hub import local_folder

SCRIPT = """
import sys
from pathlib import Path
from dspark_train.errors import UserError
from dspark_train.hub import check_push, local_folder, push
try:
    if sys.argv[1] == "push":
        check_push(sys.argv[3])
        print(push(Path(sys.argv[2]), sys.argv[3], private=True))
    else:
        print(local_folder(sys.argv[2]))
except UserError as error:
    print(error)
    raise SystemExit(2)
"""


@pytest.fixture
def hub():
    with hub_server.running() as running:
        yield running


@pytest.fixture
def call(hub, tmp_path):
    """A process of its own: the library reads the hub's address once, when it is imported."""

    def call(*words, token=hub_server.TOKEN):
        env = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": token}
        env.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *map(str, words)],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout.strip().splitlines()[-1]

    return call


@pytest.fixture
def draft(tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen3DSparkModel"]}')
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder / "README.md").write_text("---\n" + yaml.safe_dump({"base_model": "some/model"}) + "---\n")
    return folder


def test_what_is_pushed_is_read_back(hub, call, draft):
    status, address = call("push", draft, "us/tiny-draft")
    assert status == 0
    assert address.startswith(f"{hub.address}/us/tiny-draft/commit/")
    assert hub.private == {"us/tiny-draft": True}
    status, folder = call("read", "us/tiny-draft@main")
    assert status == 0
    for file in draft.iterdir():
        assert (type(file)(folder) / file.name).read_bytes() == file.read_bytes()


def test_a_wrong_token_is_one_line(hub, call, draft):
    status, said = call("push", draft, "us/tiny-draft", token="hf_wrong")
    assert status == 2
    assert "hub did not take our token" in said
    assert hub.repositories == {}


def test_a_broken_upload_leaves_nothing_half(hub, call, draft):
    hub.breaks = True
    status, said = call("push", draft, "us/tiny-draft")
    assert status == 2
    assert "not pushed" in said
    assert "run the same command again" in said
    assert hub.repositories == {"us/tiny-draft": {}}


def test_unknown_repository_and_revision(hub, call):
    hub.repositories["us/there"] = {"config.json": b"{}"}
    for name in ("us/nothing", "us/there@v9"):
        status, said = call("read", name)
        assert status == 2
        assert name in said
        assert "hub did not give it" in said


@pytest.mark.parametrize("name", ["one/two/three", "nothing", "a b/c"])
def test_neither_folder_nor_hub_id(name):
    with pytest.raises(UserError, match="no such folder, and no hub id"):
        local_folder(name)
