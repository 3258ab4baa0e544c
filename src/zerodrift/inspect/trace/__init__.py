"""Record the operations, gradients, collectives and optimizer steps of a run, real or dry."""
