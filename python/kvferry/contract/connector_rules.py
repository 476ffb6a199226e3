"""The rules that a connector must keep, as the scripted leader and workers check them."""

from kvferry.contract.rules import Rule

_CONVERSATION = "Conversation"

CONNECTOR_RULES = (
    Rule("hello-first", "the first message of a connection is hello", f"{_CONVERSATION} 1"),
    Rule(
        "hello-fields",
        "hello has version 1 in its header, a range of versions and 16 bytes of engine",
        f"{_CONVERSATION} 1",
    ),
    Rule("hello-again", "after a lost connection hello is sent again, with the same engine", f"{_CONVERSATION} 5"),
    Rule("agreed-version", "messages have the version of the welcome in their headers", f"{_CONVERSATION} 1"),
    Rule("well-formed", "headers and bodies can be read", "Part two"),
    Rule("accepted-kinds", "only requests that the receiver accepts from this role are sent", f"{_CONVERSATION} 6"),
    Rule("deadlines", "a request has a deadline of at least 1 ms", f"{_CONVERSATION} 4"),
    Rule("credits", "no more requests and bytes wait for answers than the welcome allows", f"{_CONVERSATION} 2"),
    Rule("heartbeats", "a client that has nothing to send sends ping", f"{_CONVERSATION} 3"),
    Rule("pings-answered", "ping is answered by pong, with its id", f"{_CONVERSATION} 3"),
    Rule("unknown-requests-answered", "a request of an unknown kind is answered with unknown_kind", "Part two"),
    Rule(
        "unknown-answers-dropped", "an answer of an unknown kind is dropped, and the connection stays open", "Part two"
    ),
    Rule("unknown-fields-skipped", "unknown fields of answers are skipped", "Part two"),
    Rule("no-stray-answers", "only requests that were received are answered", f"{_CONVERSATION} 6"),
    Rule("ids-grow", "ids grow, also over restarts of an engine under its name", f"{_CONVERSATION} 5"),
    Rule("one-request-per-id", "a repeated id has the same body", f"{_CONVERSATION} 5"),
    Rule(
        "unanswered-repeated",
        "loads, stores and finishes without an answer are repeated over the next connection",
        f"{_CONVERSATION} 5",
    ),
    Rule(
        "registration-consistent",
        "a registration describes the memory without contradictions",
        "How a rank describes its memory",
    ),
    Rule("registration-proven", "the memory holds its proofs", "Proofs"),
    Rule("content-given", "a registration has a content, the same on all ranks", "How a rank describes its memory"),
    Rule("registers-again", "a rank that lost its connection registers again", "unregister"),
    Rule("written-again", "a rank that registers again sends written again", "A load is ordered after pending writes"),
    Rule("slots-opened", "loads and stores name a slot that a lookup has opened", f"{_CONVERSATION} 5"),
    Rule("load-within-hit", "a load names pages that the last lookup of its slot found", "Lookup, load and store"),
    Rule("load-after-lower", "load.after is below the id of the load", "A load is ordered after pending writes"),
    Rule(
        "hashes-agree", "hashes in a store agree with those of the slot, and leave none out", "Lookup, load and store"
    ),
    Rule(
        "pages-kept", "until a load or a store is answered, its pages are used for nothing else", "When pages are free"
    ),
    Rule("busy-keeps-pages", "pages refused with busy, without over, stay in use", "When pages are free"),
    Rule(
        "one-store-of-a-page", "a page of a slot is not stored again while a store of it is open", f"{_CONVERSATION} 5"
    ),
    Rule("written-after-the-bytes", "written is sent when the pages are written", "Lookup, load and store"),
    Rule("failed-pages-computed", "pages that a load did not bring are computed", "Lookup, load and store"),
    Rule("hits-used", "pages that a lookup found are loaded", "Lookup, load and store"),
    Rule("slots-finished", "every slot is finished, which releases its pages", f"{_CONVERSATION} 5"),
    Rule("hashes-chained", "a page's hash covers all tokens before it", "Hashes and namespaces"),
    Rule("hashes-cover-tokens", "pages with other tokens have other hashes", "Hashes and namespaces"),
    Rule("hashes-repeat", "the same tokens in one space have the same hashes", "Hashes and namespaces"),
    Rule("spaces-apart", "models, adapters and salts differ in content, namespace or hashes", "Hashes and namespaces"),
)
