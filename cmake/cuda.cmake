# lookahead::cuda, the device side: where there is a CUDA toolkit.
find_package(CUDAToolkit QUIET)
if(CUDAToolkit_FOUND AND NOT TARGET lookahead::cuda)
  add_library(lookahead::cuda INTERFACE IMPORTED GLOBAL)
  target_link_libraries(lookahead::cuda INTERFACE lookahead::lookahead CUDA::cudart)
endif()
