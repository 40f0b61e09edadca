"""Reports: pure renderings of records, as text for people and as versioned JSON for programs."""
