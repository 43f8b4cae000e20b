"""`diff`: where two runs part. Digests of global values, recorded on every rank, assembled and compared."""
