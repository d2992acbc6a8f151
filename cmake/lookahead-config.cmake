include(${CMAKE_CURRENT_LIST_DIR}/lookahead-targets.cmake)

# A part that needs more than a C++ compiler installs a file of its own here.
foreach(component IN LISTS lookahead_FIND_COMPONENTS)
  include(${CMAKE_CURRENT_LIST_DIR}/components/${component}.cmake OPTIONAL RESULT_VARIABLE lookahead_${component}_FOUND)
  if(NOT lookahead_${component}_FOUND AND lookahead_FIND_REQUIRED_${component})
    set(lookahead_FOUND FALSE)
    set(lookahead_NOT_FOUND_MESSAGE "this installation of lookahead has no component ${component}")
  endif()
endforeach()
