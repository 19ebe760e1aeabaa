"""One module a `laddertron` command; each defines `command` and imports what is heavy only when it runs."""
