"""What a layer's part gives, added to the residual stream, and the stream normalised for the next part."""

from pallas_kernels.add_norm.entry import add_norm as add_norm
