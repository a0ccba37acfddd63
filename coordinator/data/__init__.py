"""Problems of the operator's: read from wherever they are, once, into a copy that belongs to the round."""
