"""What the scheduler's side keeps of requests and copies: nothing when all are over."""

from typing import Any


def left(side: Any) -> dict[str, Any]:
    """Returns the records that are not empty, without those of finishes, which only the next step removes."""
    found = {
        "requests": side._tracked,
        "loading": side._loads._loading,
        "spoiled": side._loads._spoiled,
        "loads": side._loads._waiting,
        "unreported loads": side._loads._unreported,
        "copies": side._copies._open,
        "stored pages": side._copies._stored_pages,
        "early lookups": side._lookups._early,
    }
    if side.verification is not None:
        found |= {
            "stores to verify": side.verification._stores,
            "loads to verify": side.verification._checking,
            "orders of checksums": side.verification._ordered,
            "entries of loads": side.verification._expected,
            "pages to verify": side.verification._open,
            "pages to remove": side.verification._removals._to_remove,
        }
    return {name: what for name, what in found.items() if what}
