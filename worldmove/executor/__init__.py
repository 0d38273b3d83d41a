"""One process per device that digests, copies and wipes."""
