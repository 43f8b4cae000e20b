"""Operators that are tested as authors call them, by family: they have no entry in `operator_source_calls`."""


def _names(text):
    return frozenset(text.split())


ELEMENTWISE = _names(
    """
    AccumulateNV2 AcosExt Acosh AcoshExt Angle ApproximateEqual AsinExt Asinh AsinhExt AtanExt Atanh BesselI0
    BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Complex
    Conj Digamma DivNoNan Eps Erfinv Exp2 FFT FFT2 FFTN FFTShift Fills Fmax Fmin Frac Gcd HFFT HFFT2 HFFTN HShrink
    Hardtanh Heaviside Hypot IFFT IFFT2 IFFTN IFFTShift IHFFT IHFFT2 IHFFTN IRFFT IRFFT2 IRFFTN Igamma Igammac Imag
    ImagView IsClose IsNegInf Lcm LeftShift Lgamma LogAddExp2 Logit MulNoNan Mvlgamma NextAfter Polar Polygamma
    PopulationCount RFFT RFFT2 RFFTN Real RealView RightShift Rint Sinc SoftShrink Softsign Threshold Xdivy Zeta
    """
)
MATRICES = _names(
    """
    Addbmm Addmv Cdist Cholesky CholeskyInverse CholeskySolve CholeskyTrsm Cross Diag Diagonal DetTriangle Eig Eigh
    Einsum FillDiagonal Geqrf Ger LinalgQr LogMatrixDeterminant Lstsq LuSolve LuUnpack MatrixBandPart
    MatrixDeterminant MatrixExp MatrixInverse MatrixInverseExt MatrixPower MatrixSolve Meshgrid Orgqr Ormqr
    Pdist Qr Svd Trace TraceExt TraceV2 TriangularSolve
    """
)
REDUCTIONS = _names(
    """
    CountNonZero DeprecatedCountNonzero DeprecatedMedian DeprecatedNansum InTopK L2Loss L2Normalize LpNorm LpNormV2
    Median MedianDim MedianExt Nansum Quantile Renorm ReverseSequence
    """
)
SCANS = _names("Cummax Cummin CumminExt CumulativeLogsumexp Kthvalue")
IMAGES = frozenset({"DeformableOffsets"})
DRAWS = _names("RandExt RandInt RandIntLike RandLikeExt Randn RandnLike RandpermExt")
STATE = _names("Assign")
VERIFIED = ELEMENTWISE | MATRICES | REDUCTIONS | SCANS | IMAGES | DRAWS | STATE
