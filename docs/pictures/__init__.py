"""The pictures of docs/architecture.md, drawn by `.venv/bin/python -m docs.pictures` into docs/img."""
