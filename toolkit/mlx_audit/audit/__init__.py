"""An audit: plan, child process, events, results, exit code. Nothing is imported here: the command line starts fast."""
