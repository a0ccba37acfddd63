"""Who takes part and how they stand: nodes, owners, trust, orders about them, appeals, and why; as effects."""
