"""Limits of a peer on the messages that it receives, which their sender keeps: a longer message would be refused.

A welcome has those of the peer by their names in ``schema/messages.json``. One that it lacks is that of the table.
"""

import msgspec

from kvferry import wire

#: The limits that requests of these clients can exceed, as the table has them.
TABLE = {
    "abandoned_requests": wire.ABANDONED_MAX,
    "body_bytes": wire.BODY_BYTES_MAX,
    "content_bytes": wire.CONTENT_BYTES_MAX,
    "namespace_bytes": wire.NAMESPACE_BYTES_MAX,
    "page_hashes": wire.HASHES_MAX,
    "page_items": wire.PAGE_ITEMS_MAX,
    "pages": wire.PAGES_MAX,
    "parts": wire.PARTS_MAX,
    "stores": wire.STORES_MAX,
    "text_bytes": wire.TEXT_BYTES_MAX,
}
#: Of several stores in one message, these count together.
OF_ALL_STORES = ("parts", "pages", "page_hashes")


def of_peer(welcomed: dict[str, int]) -> dict[str, int]:
    """Returns the limits of a peer, from its welcome: none above that of the table, which is this side's own."""
    return {name: min(welcomed.get(name, most), most) for name, most in TABLE.items()}


def sizes(message: msgspec.Struct) -> dict[str, int]:
    """Returns what a request has of that which limits bound, beside the bytes of its body."""
    match message:
        case wire.Lookup():
            return {
                "namespace_bytes": len(message.namespace),
                "page_hashes": len(message.hashes) // max(message.hash_bytes, 1),
            }
        case wire.Load():
            return _of_parts(message.parts)
        case wire.Store():
            return {
                **_of_parts(message.parts),
                "page_hashes": len(message.more_hashes) // max(message.hash_bytes, 1),
            }
        case wire.Reset():
            return {
                "namespace_bytes": len(message.namespace or b""),
                "page_hashes": len(message.hashes) // max(message.hash_bytes, 1),
            }
        case wire.ReadEvents():
            return {"namespace_bytes": len(message.namespace or b"")}
        case wire.Abandon():
            return {"abandoned_requests": len(message.requests)}
        case wire.Register():
            return {"content_bytes": len(message.registration.get("content", b""))}
        case wire.SetLog():
            return {"text_bytes": len(message.filter.encode())}
        case _:
            return {}


def _of_parts(parts: list[wire.Part]) -> dict[str, int]:
    pages = sum(1 if isinstance(item, int) else item[1] for part in parts for item in part.pages)
    return {"parts": len(parts), "page_items": max((len(part.pages) for part in parts), default=0), "pages": pages}


def exceeded(kind: wire.Kind, sizes: dict[str, int], limits: dict[str, int]) -> str | None:
    """Returns which limit a request exceeds, for its failure; None if it exceeds none."""
    for name, size in sizes.items():
        if size > limits[name]:
            what = f"the {kind.name.lower()} has {size} {name.replace('_', ' ')}"
            return f"{what}, more than the {limits[name]} of a message to this peer: name less in one request"
    return None
