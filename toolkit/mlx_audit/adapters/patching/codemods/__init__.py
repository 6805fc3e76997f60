"""The codemods, one mechanism a file; `patch.codemods` finds them."""
