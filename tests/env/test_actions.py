import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuewalk.env import LABELS, Bad, Expand, Refine, Stop, format_action, parse_action
from cuewalk.env.actions import BAD_REASONS


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("STOP", Stop()),
        ("  STOP\n", Stop()),
        ("EXPAND H", Expand(("H",))),
        ("EXPAND H T a Z", Expand(("H", "T", "a", "Z"))),
        ("REFINE dog  back home", Refine("dog  back home")),
        ("REFINE STOP", Refine("STOP")),
        ("", Bad("unparsable")),
        ("stop", Bad("unparsable")),
        ("EXPAND", Bad("unparsable")),
        ("EXPAND 7", Bad("unparsable")),
        ("EXPAND HT", Bad("unparsable")),
        ("EXPAND  H", Bad("unparsable")),
        ("REFINE", Bad("unparsable")),
        ("REFINE  ", Bad("unparsable")),
        ("I would STOP", Bad("unparsable")),
        ("STOP now", Bad("trailing_text")),
        ("EXPAND H and T", Bad("trailing_text")),
        ("EXPAND H, T", Bad("trailing_text")),
        ("STOP\nbecause", Bad("trailing_text")),
        ("EXPAND H\nSTOP", Bad("several_actions")),
        ("EXPAND A B C D E", Bad("over_the_cap")),
        ("EXPAND A A", Bad("repeated_label")),
    ],
)
def test_an_action_is_read_strictly(text, action):
    assert parse_action(text) == action


@given(st.text(max_size=60))
def test_any_text_is_an_action_or_bad_under_a_known_reason(text):
    action = parse_action(text)
    assert not isinstance(action, Bad) or action.reason in BAD_REASONS


@given(
    st.one_of(
        st.just(Stop()),
        st.lists(st.sampled_from(LABELS), min_size=1, max_size=4, unique=True).map(lambda x: Expand(tuple(x))),
        st.from_regex(r"[a-z0-9]([a-z0-9 ]{0,20}[a-z0-9])?", fullmatch=True).map(Refine),
    )
)
def test_writing_and_reading_are_inverse(action):
    assert parse_action(format_action(action)) == action
