"""The command line: one module a command or family of commands; app.py puts them together."""
