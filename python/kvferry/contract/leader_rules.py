"""The rules that an engine relies on, as the checks of a running kvferry see them."""

from kvferry.contract.rules import Rule

LEADER_RULES = (
    Rule("welcome", "hello is answered by welcome, in version 1, with a version of both sides", "Conversation 1"),
    Rule("hello-comes-first", "another first message is refused as hello_first", "Conversation 1"),
    Rule("versions-without-overlap", "a hello without a common version is refused as unsupported_version", "Versions"),
    Rule("unknown-role", "a hello with an unknown role is refused as invalid", "Conversation 1"),
    Rule("pong", "ping is answered by pong, with its id", "Conversation 3"),
    Rule(
        "unknown-request", "a request of an unknown kind is answered unknown_kind, and the connection stays", "Part two"
    ),
    Rule("unknown-answer", "an answer of an unknown kind is dropped, and the connection stays", "Part two"),
    Rule("unknown-field", "unknown fields of a request are skipped", "Part two"),
    Rule("required-bit", "a message with an unknown required bit is refused as unsupported", "Part one"),
    Rule("malformed-body", "a body that cannot be read is answered malformed", "Conversation 6"),
    Rule("wrong-role", "a request that this role may not send is refused", "Conversation 6"),
    Rule("register-content", "a registration without content is refused as invalid", "How a rank describes its memory"),
    Rule(
        "register-contradiction",
        "a contradiction in a registration is refused as invalid",
        "How a rank describes its memory",
    ),
    Rule("register-proof", "memory without its proof is refused", "Proofs"),
    Rule("register", "a right registration is answered with room and page size", "Conversation 6"),
    Rule("lookup-nothing", "a lookup finds no page that was never stored", "Hashes and namespaces"),
    Rule("store-waits", "a store is read only when written came, and then as written", "Lookup, load and store"),
    Rule("store-found", "a lookup finds stored pages, up to limit_pages", "Lookup, load and store"),
    Rule(
        "load-bytes",
        "a load brings the bytes that were stored, to the pages that it names and no others",
        "Lookup, load and store",
    ),
    Rule(
        "load-after", "a load begins when the work that it names is written", "A load is ordered after pending writes"
    ),
    Rule("load-pinned", "a load of pages that no lookup found is refused with over", "Lookup, load and store"),
    Rule("namespaces-apart", "a lookup finds no page of another namespace", "Hashes and namespaces"),
    Rule("present-pages", "a store of present pages counts them, and stores none", "Lookup, load and store"),
    Rule("stores-together", "the stores of one message have one effect and one result each", "Lookup, load and store"),
    Rule("retry-answer", "a repeated request has the same answer and no second effect", "Conversation 5"),
    Rule("retry-reconnect", "a request that is repeated over a new connection is answered there", "Conversation 5"),
    Rule("hashes-of-a-slot", "a store with other hashes than its slot is refused with over", "Lookup, load and store"),
    Rule("held-pages", "a reset is refused as leased while a lookup holds a page, and not after its finish", "reset"),
    Rule("finish-closes", "a load or store of a finished slot is refused as unknown_slot, with over", "Conversation 5"),
    Rule("cancel-stores", "cancel_stores ends the stores, which are answered, and counts them", "cancel_stores"),
    Rule("abandon", "abandon ends the copies of its requests, and no later one begins", "Lookup, load and store"),
    Rule(
        "deadline-of-a-store",
        "a store that is never written ends by its deadline, and frees its pages",
        "Conversation 4",
    ),
    Rule("credits-end", "a request beyond the credits is answered busy, with retry and without over", "Conversation 2"),
    Rule("read-events", "the change log has stored and gone pages, in their order", "read_events"),
    Rule("reset-by-hash", "a reset by hash removes these pages", "reset"),
    Rule("hash-width", "hashes of another width than 16 to 64 bytes are refused", "Limits"),
    Rule("registers-again", "a rank registers again, and what was stored is loaded", "Conversation 7"),
    Rule("unregister", "unregister is answered when nothing of the memory is open", "unregister"),
    Rule("silent-client", "a client that sends nothing for three heartbeats is closed", "Conversation 3"),
    Rule("one-answer", "every request gets one answer", "Conversation 6"),
    Rule("errors-typed", "an error has a known code and one line of text", "Error codes"),
)
