"""Operations of a script's own code, outside of forwards and steps: losses, copies of weights, averages."""
