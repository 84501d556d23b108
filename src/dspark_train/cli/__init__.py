"""The command line: a file per command. The only place that knows every package."""
