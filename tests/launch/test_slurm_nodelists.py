"""Slurm's lists of nodes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farprop.errors import UsageError
from farprop.rpc.slurm import first_host, hosts


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[01,03]", ["gpu01", "gpu03"]),
        ("gpu[8-10]", ["gpu8", "gpu9", "gpu10"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("gpu[098-100,200]", ["gpu098", "gpu099", "gpu100", "gpu200"]),
        ("rack[1-2]-node[3-4]", ["rack1-node3", "rack1-node4", "rack2-node3", "rack2-node4"]),
        ("gpu[1-2].cluster.example", ["gpu1.cluster.example", "gpu2.cluster.example"]),
        ("login,gpu[1,3-4],big7", ["login", "gpu1", "gpu3", "gpu4", "big7"]),
    ],
)
def test_lists(nodes: str, expected: list[str]) -> None:
    assert list(hosts(nodes)) == expected
    assert first_host(nodes) == expected[0]


@pytest.mark.parametrize(
    "nodes", ["", " ", ",", "a,,b", "a[", "a]", "a[1", "a[[1]]", "a[]", "a[x]", "a[1-]", "a[-1]", "a[3-1]", "a[1-2-3]"]
)
def test_nonsense(nodes: str) -> None:
    with pytest.raises(UsageError, match="list of nodes"):
        list(hosts(nodes))


def test_a_list_of_billions_takes_no_time() -> None:
    assert first_host("a[0-999999999999]b[0-999999999999]") == "a0b0"


_names = st.from_regex(r"[a-z][a-z.-]{0,4}", fullmatch=True)


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """What is in a bracket, and the numbers that it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 4))
        first = draw(st.integers(0, 10**width - 1))
        last = draw(st.integers(first, first + 5))
        texts.append(f"{first:0{width}}" if last == first else f"{first:0{width}}-{last:0{width}}")
        numbers += [f"{number:0{width}}" for number in range(first, last + 1)]
    return ",".join(texts), numbers


@st.composite
def _parts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One host, or several with brackets; and the hosts."""
    text, choices = draw(_names), []
    choices.append([text])
    for inside, numbers in draw(st.lists(_ranges(), max_size=2)):
        after = draw(st.one_of(st.just(""), _names))
        text += f"[{inside}]{after}"
        choices.append([number + after for number in numbers])
    return text, ["".join(words) for words in itertools.product(*choices)]


@given(st.lists(_parts(), min_size=1, max_size=4))
def test_a_list_gives_back_the_hosts_that_it_was_made_of(parts: list[tuple[str, list[str]]]) -> None:
    expected = [host for _, made in parts for host in made]
    assert list(hosts(",".join(text for text, _ in parts))) == expected


@given(st.text(alphabet="ab1209[],- ²", max_size=30))
def test_any_text_gives_hosts_or_a_usage_error(text: str) -> None:
    try:
        assert first_host(text)
    except UsageError:
        pass
