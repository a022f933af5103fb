"""The `fold3d` command; one module per subcommand."""
