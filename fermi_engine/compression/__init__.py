"""What makes a model smaller: formats by rule, fitted scales, experts left out, and the measurements behind them."""
