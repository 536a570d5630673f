from .bits import BitExplorer as BitExplorer
from .calculator import Calculator as Calculator
from .padding import PaddingExplorer as PaddingExplorer
from .sandbox import AllocatorSandbox as AllocatorSandbox
from .segments import SegmentFilm as SegmentFilm
from .serving_calculator import ServingCalculator as ServingCalculator
from .tiles import TilePlayer as TilePlayer
