from __future__ import annotations

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend
from cloudtrain.errors import MissingExtra, UnknownBackend


def test_the_table_is_sorted_and_importable(tmp_path):
    assert list(registry.BUILT_IN) == sorted(registry.BUILT_IN)
    for name in registry.BUILT_IN:
        assert isinstance(registry.create(name, {}, tmp_path), Backend)


def test_unknown_backend_names_the_nearest_and_all():
    with pytest.raises(UnknownBackend, match="did you mean local") as error:
        registry.backend_class("locl")
    assert "known backends: akash, azureml, kubernetes, local" in error.value.hint


def test_installed_packages_are_read_once_in_a_process():
    registry._entry_points.cache_clear()
    for _ in range(3):
        assert set(registry.names()) >= set(registry.BUILT_IN)
        registry.traits("no-such-backend")
    assert registry._entry_points.cache_info().misses == 1


def test_a_missing_extra_is_the_pip_line(monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN, "far", ("no_such_sdk.module:Thing", "far"))
    with pytest.raises(MissingExtra) as error:
        registry.backend_class("far")
    assert error.value.hint == "pip install 'cloudtrain[far]'"


def test_a_bug_in_a_backend_is_not_taken_for_a_missing_extra(monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN, "broken", ("cloudtrain.no_such_module:Thing", "far"))
    with pytest.raises(ModuleNotFoundError):
        registry.backend_class("broken")
