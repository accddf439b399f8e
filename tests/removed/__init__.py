"""The sections that release 0.19.8 of the original removed: their last published configurations train here."""
