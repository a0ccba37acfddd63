"""Problems of the operator's: sources, columns, and the copy that belongs to a round."""
