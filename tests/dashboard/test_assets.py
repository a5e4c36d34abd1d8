"""The files of the page: they are what they are said to be, and lead nowhere else."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import farprop.dashboard

ROOT = Path(__file__).parents[2]
STATIC = Path(farprop.dashboard.__file__).parent / "static"
VENDOR = STATIC / "vendor"


def test_libraries_are_those_of_the_manifest_and_of_the_lock() -> None:
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["manifest.json"]
    assert found == manifest["sha256"]
    lock = json.loads((ROOT / "frontend/package-lock.json").read_text())["packages"]
    assert manifest["versions"] == {name: lock[f"node_modules/{name}"]["version"] for name in manifest["versions"]}
    for name, version in manifest["versions"].items():
        assert f"{name} {version} (" in (VENDOR / "LICENSES.txt").read_text()


def test_lock_names_no_host_to_download_from() -> None:
    lock = json.loads((ROOT / "frontend/package-lock.json").read_text())
    assert not any("resolved" in package for package in lock["packages"].values())


def test_page_knows_no_other_host() -> None:
    names = re.compile(r"https?://[^\"'`\s)]+")  # names of XML are no addresses
    for path in STATIC.rglob("*"):
        if path.suffix in (".js", ".css", ".html", ".svg"):
            assert {
                found for found in names.findall(path.read_text()) if not found.startswith("http://www.w3.org/")
            } == set()
