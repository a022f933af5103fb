"""Draws all pictures of docs/architecture.md."""

from __future__ import annotations

from docs.pictures import components, lives

if __name__ == "__main__":
    for target in (components.draw(), *lives.draw()):
        print(target)
