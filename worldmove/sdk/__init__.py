"""The worker SDK's parts; serving stacks import `worldmove.worker`."""
