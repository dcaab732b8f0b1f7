"""Tool use for Miles: conversations of several turns by token ids, with tools that run in a sandbox."""
