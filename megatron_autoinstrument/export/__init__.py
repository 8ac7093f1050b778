"""From records to what leaves: bytes or spans, providers, ids, the resource, metrics, and the count of what is lost."""
