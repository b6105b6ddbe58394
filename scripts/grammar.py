"""Decoding under the action grammar, for policies that never learnt it.

Never used in training: with a grammar a cold policy's gradient would be the grammar's own probability mass.
"""

from collections.abc import Callable
from functools import cache, partial

from cuewalk.env import RetrievalEnv
from cuewalk.rl.sampler import Allowed
from cuewalk.rl.transcript import Chat


@cache
def plain_ids(chat: Chat, opening: bool) -> list[int]:
    """Return the ids that may stand in a query: no special token, no line break, whole characters.

    The `opening` one starts a word after a space.
    """
    special = set(chat.tokenizer.all_special_ids)
    texts = chat.tokenizer.batch_decode([[id_] for id_ in range(len(chat.tokenizer))])
    plain = {i: t for i, t in enumerate(texts) if i not in special and t.isprintable() and "\ufffd" not in t}
    return [i for i, text in plain.items() if not opening or (text[:1] == " " and text[1:2].isalnum())]


def lawful(chat: Chat, max_action_tokens: int) -> Callable[[RetrievalEnv], Allowed]:
    """Return what `walk` asks in each state, see `allowed_ids`."""
    return partial(allowed_ids, chat, max_action_tokens=max_action_tokens)


def allowed_ids(chat: Chat, env: RetrievalEnv, max_action_tokens: int) -> Allowed:
    """Return what may follow an action's ids in this state: legal letters, affordable lengths, free queries.

    The last id of a query of `max_action_tokens` must be the end of turn.
    """
    stop = chat.action("STOP")
    expand, refine = chat.untrusted("EXPAND"), chat.untrusted("REFINE")
    letters = [chat.letters[label] for label, _ in env.state.frontier]
    most = min(env.affordable, len(letters))
    may_refine = env.state.budget >= env.config.refine_cost
    openings = [stop, *([expand] if most else []), *([refine] if may_refine else [])]
    ends = {chat.end, *chat.tokenizer.all_special_ids}

    def allowed(ids: list[int]) -> list[int] | None:
        if most and ids[: len(expand)] == expand:
            taken = ids[len(expand) :]
            free = [letter for letter in letters if letter not in taken]
            return [*(free if len(taken) < most else []), *([chat.end] if taken else [])]
        if may_refine and ids[: len(refine)] == refine:
            if len(ids) >= max_action_tokens - 1:
                return [chat.end]
            written = len(ids) > len(refine)
            return [*plain_ids(chat, opening=not written), *([chat.end] if written else [])]
        following = {opening[len(ids)] for opening in openings if opening[: len(ids)] == ids}
        return sorted(following - (ends - {chat.end}))

    return allowed
