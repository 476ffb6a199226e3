"""Contract tests for authors of engines' connectors, in any language: see ``docs/contract.md``.

``python -m kvferry.contract leader`` checks a running kvferry, ``python -m kvferry.contract serve`` checks a connector.
"""
