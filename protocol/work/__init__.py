"""Work and its judgement: leases, sampling, claims, fragments, evidence, audits, appeals."""
