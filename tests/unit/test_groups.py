import pytest

from megatron_autoinstrument.common import groups, semconv


def test_a_spec_mixes_presets_and_groups():
    assert groups.parse("default, microbatch") == groups.PRESETS["default"] | {"microbatch"}


def test_all_and_its_other_name_are_every_group():
    assert groups.parse("all") == groups.parse("profiling") == frozenset(groups.GROUPS)


@pytest.mark.parametrize("spec", ["steps", "default,steps", "", ","])
def test_an_unknown_name_is_refused(spec):
    with pytest.raises(ValueError, match=f"^{spec}$"):
        groups.parse(spec)


def test_every_span_belongs_to_a_known_group():
    assert set(semconv.SPAN_GROUPS.values()) <= set(groups.GROUPS)
